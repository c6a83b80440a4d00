"""Waits for a state that a thread or another process comes to."""

import time


def wait_for(condition, seconds=300, what="a condition"):
    """Returns what `condition` returned when it was true."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"{what} did not come true in {seconds} s"
        time.sleep(0.02)
    return found
