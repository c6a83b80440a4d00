"""How the learning rate of every stage rises and falls."""

import math


def schedule(step: int, steps: int, warmup: int, passed: float = 0.0, floor: float = 0.01) -> float:
    """Factor of the learning rate: a linear start, then half a cosine over the steps.

    Or over the time, where more of that has ``passed`` (0..1) than of the steps.
    """
    rising = min((step + 1) / warmup, 1.0)
    return rising * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(max(step / steps, passed), 1.0))))
