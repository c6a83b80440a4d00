"""Run the stand-in for ComfyUI in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def load_pack(models, *, installed=True, also_on_path=None):
    """What ComfyUI would see of the pack. `installed`: comfy_tpu can be imported before the pack is."""
    script = ROOT / "tests" / "comfy_pack" / "fake_comfyui.py"
    places = [*([ROOT / "src"] if installed else []), *([also_on_path] if also_on_path else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}
    command = [sys.executable, "-P", script, ROOT, models, *([] if installed else ["bare"])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=models)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
