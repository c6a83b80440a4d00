"""`comfy-tpu batch` whose Ray workers run tests/jobs/ray_stand_in.py instead of a model. STAND_IN_STALL: seconds."""

import dataclasses
import os
import sys

from comfy_tpu.cli import batch, main

if __name__ == "__main__":
    changes = {"worker_module": "ray_stand_in"}
    if "STAND_IN_STALL" in os.environ:
        seconds = float(os.environ["STAND_IN_STALL"])
        changes["stall_seconds"] = {**batch.RAY_DEFAULTS.stall_seconds, "denoising": seconds}
    batch.RAY_DEFAULTS = dataclasses.replace(batch.RAY_DEFAULTS, **changes)
    sys.exit(main.main(["batch", *sys.argv[1:]]))
