"""Puts the files of one directory in the place of another's, killed before every system call in turn.

    python killed_sequences.py OLD NEW RESULTS

RESULTS/1 is what the run leaves that is killed before its first call, and so on; the last one was not killed. A process
of its own, and a small one, because it forks.
"""

import os
import re
import shutil
import sys
from pathlib import Path

from comfy_tpu.pipeline import atomic

EVENTS = ("open", "os.mkdir", "os.remove", "os.rename", "os.rmdir")


def replace(directory, new):
    with atomic.replacing_sequence(directory, re.compile(r"frame_\d{4,}\.png")) as partial:
        for path in new.iterdir():
            (partial / path.name).write_bytes(path.read_bytes())


def is_killed(step, directory, new):
    """Whether there are so many steps."""
    child = os.fork()
    if not child:
        seen = 0

        def kill(event, arguments):
            nonlocal seen
            seen += event in EVENTS
            if seen == step:
                os._exit(9)

        sys.addaudithook(kill)
        replace(directory, new)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


if __name__ == "__main__":
    old, new, results = map(Path, sys.argv[1:])
    step, killed = 0, True
    while killed:
        step += 1
        shutil.copytree(old, results / str(step))
        killed = is_killed(step, results / str(step), new)
