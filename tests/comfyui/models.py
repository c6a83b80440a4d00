"""Models that the tests put into ComfyUI's folders."""

import json
import shutil
from pathlib import Path

from comfy_tpu.pipeline.model_files import DEMO_DIRECTORY

LOCAL_MODEL = "some-owner/local-demo"
LARGE_MODEL = "large-demo"
"""Says of itself that it draws 256×256, so that height and width count."""


def copy_demo(base: Path, name: str, **settings: int) -> Path:
    """The demo model as a user's own, in ComfyUI's folder for models in diffusers' layout."""
    directory = base / "models" / "diffusers" / name
    shutil.copytree(DEMO_DIRECTORY, directory, ignore=shutil.ignore_patterns("image_to_video"))
    # One byte that means nothing: a model with the same fingerprint would share the demo's weights on the device.
    with (directory / "vae" / "config.json").open("a", encoding="utf-8") as file:
        file.write("\n")
    if settings:
        path = directory / "generation.json"
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | settings), encoding="utf-8")
    return directory
