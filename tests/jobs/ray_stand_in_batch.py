"""`comfy-tpu batch` whose Ray workers run tests/jobs/ray_stand_in.py instead of a model. STAND_IN_STALL: seconds."""

import dataclasses
import os
import sys

from comfy_tpu.cli import main, ray_options

if __name__ == "__main__":
    changes = {"worker_module": "ray_stand_in"}
    if "STAND_IN_STALL" in os.environ:
        seconds = float(os.environ["STAND_IN_STALL"])
        changes["stall_seconds"] = {**ray_options.RAY_DEFAULTS.stall_seconds, "denoising": seconds}
    ray_options.RAY_DEFAULTS = dataclasses.replace(ray_options.RAY_DEFAULTS, **changes)
    sys.exit(main.main(["batch", *sys.argv[1:]]))
