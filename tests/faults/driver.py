"""Examines stages in a process with the preloaded library: driver.py LIBRARY DIRECTORY SAMPLE STAGE…

Prints a line of JSON for each stage. SAMPLE: of each kind, the first and last points and so many between; 0: all.
"""

import dataclasses
import json
import sys
from pathlib import Path

from tests.faults import writing_stages
from tests.faults.examination import Examination
from tests.faults.injection import SystemPoints


def command_stages():
    from tests.faults import command_stages  # jax and diffusers, which the others do not need

    return command_stages.STAGES


def choose(sample: int):
    def every(count: int):
        if not sample or count <= sample + 2:
            return range(1, count + 1)
        return sorted({1, count, *(1 + round(count * at / (sample + 1)) for at in range(1, sample + 1))})

    return every


def main() -> None:
    library, directory, sample, *names = sys.argv[1:]
    points = SystemPoints(Path(library))
    for name in names:
        place = Path(directory) / name.replace(" ", "-")
        work = place / "work"
        work.mkdir(parents=True)
        points.watch(work)
        stages = writing_stages.STAGES if name in writing_stages.STAGES else command_stages()
        stage, kinds = stages[name](work, points.watch)
        report = Examination(work, points, choose(int(sample))).examine(stage, kinds=kinds)
        sys.stdout.write(json.dumps({"stage": name, **dataclasses.asdict(report)}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
