"""The same frames are the same bytes in every format, whatever is in the memory that the encoders get, on any number of
cores."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Without torch, which takes longer than all the rest. Shapes at which x264's macroblock tree read memory that it never
# wrote; the tall one is encoded by several threads where there are cores.
ENCODE = """
import hashlib, json, os, sys
from pathlib import Path
import numpy as np
from comfy_tpu.pipeline import video_formats

if sys.argv[2] == "one core":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
found = {}
for height, width, count in ((48, 16, 9), (64, 32, 17), (80, 16, 17), (33, 45, 5), (256, 64, 5)):
    y, x = np.mgrid[:height, :width]
    frames = []
    for index in range(count):
        wave = 127 + 100 * np.sin(x / 9 + index / 3) * np.cos(y / 7 - index / 5)
        frame = np.stack([wave, 255 - wave, wave / 2 + 20], -1).astype(np.uint8)
        frame[height // 4 : height // 2, 3 * index % width : 3 * index % width + width // 4] = (200, 20, 20)
        frames.append(frame)
    for encoder in (video_formats.Mp4, video_formats.Gif, video_formats.Npy, video_formats.Png):
        path = Path(sys.argv[1]) / "x"
        writing = encoder(path, 16, {"prompt": "a wave", "seed": "7"})
        for frame in frames[: 1 if encoder is video_formats.Png else None]:
            writing.add(frame)
        writing.finish()
        found[f"{encoder.__name__} {width}x{height}x{count}"] = hashlib.sha256(path.read_bytes()).hexdigest()
print(json.dumps(found))
"""


def digests(directory: Path, perturbation: int, cores: str) -> dict[str, str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "MALLOC_PERTURB_": str(perturbation)}
    command = [sys.executable, "-c", ENCODE, str(directory), cores]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    "perturbations",
    [(85,), pytest.param(tuple(range(5, 256, 25))[:10], marks=pytest.mark.slow)],
    ids=["one", "ten"],
)
def test_encoders(perturbations: tuple[int, ...], tmp_path: Path) -> None:
    """MALLOC_PERTURB_ makes glibc fill memory with a byte as it is taken and with its opposite as it is given back."""
    expected = digests(tmp_path, 0, "one core")
    for perturbation in perturbations:
        assert digests(tmp_path, perturbation, "all cores") == expected, perturbation
