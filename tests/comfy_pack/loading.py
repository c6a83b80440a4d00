"""Run the stand-in for ComfyUI, and scripts over it, in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIRECTORY = Path(__file__).parent


def load_pack(models, *, installed=True, also_on_path=None):
    """What ComfyUI would see of the pack. `installed`: comfy_tpu can be imported before the pack is."""
    places = [*([ROOT / "src"] if installed else []), *([also_on_path] if also_on_path else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}
    command = [sys.executable, "-P", DIRECTORY / "fake_comfyui.py", ROOT, models, *([] if installed else ["bare"])]
    return _run(command, environment, models)


def run_script(name, *arguments, directory=None):
    """The JSON that a script of this directory prints. `directory`: where it runs."""
    places = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
    environment = {**os.environ, "PYTHONPATH": places, "JAX_PLATFORMS": "cpu"}
    return _run([sys.executable, DIRECTORY / name, *arguments], environment, directory)


def _run(command, environment, directory):
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=directory)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
