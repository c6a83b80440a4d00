"""Peak memory of long videos: `python -m benchmarks.long.memory [--json FILE]`.

The demo model on one CPU device, in a process for each run: decoding of random latents, whole frames and in tiles, and
`generate` by windows with two steps. A process's peak is the most that it ever held of physical memory (VmHWM). The
compiler's memory is in none: an earlier run of the same length has filled the cache of programs. Where the bound does
not hold, the exit status is 1.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SHORT, LONG = 81, 1025
FACTOR = 1.15
"""What a long video may take, times a short one, besides its latents."""
_SIZES = {"decode": 192, "decode in tiles": 128, "generate": 64}
"""Pixels of a side. A frame of 192 pixels is 0.4 MB in float32, and those of 1,025 are 453 MB; of 128, 201 MB."""
_TILE_SIDE, _TILE_OVERLAP = 10, 4
"""Latents. Four tiles a frame of 128 pixels; the real side of 32 would take frames of 320, and half an hour."""
_LATENT_COPIES = 10
"""Latents that a run may hold: the solver's three samples and three velocities, and four on their way."""


@dataclasses.dataclass(frozen=True)
class Peak:
    what: str
    frames: int
    size: int
    peak_bytes: int
    latent_bytes: int


def measure(what: str, frames: int, size: int | None = None) -> Peak:
    """Runs this module in a process of its own."""
    side = _SIZES[what] if size is None else size
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.long.memory", "--run", what, str(frames), str(side)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return Peak(**json.loads(done.stdout.splitlines()[-1]))


def _measure_again(what: str, frames: int) -> Peak:
    measure(what, frames)  # compiles
    return measure(what, frames)


def is_bounded(short: Peak, long: Peak) -> bool:
    return long.peak_bytes <= FACTOR * short.peak_bytes + _LATENT_COPIES * long.latent_bytes


def run(what: str, frames: int, side: int) -> Peak:
    import torch

    from comfy_tpu.config import RuntimeConfig
    from comfy_tpu.families.model_family import Tiles
    from comfy_tpu.pipeline import artifacts, media
    from comfy_tpu.pipeline.video import VideoPipeline

    pipeline = VideoPipeline.open("demo", RuntimeConfig(mesh="single"))
    settings = pipeline.settings(num_frames=frames, height=side, width=side, num_inference_steps=2)
    if what == "decode in tiles":
        from comfy_tpu.pipeline import decode, video

        def decode_in_tiles(decode_frame: Any, latents: Any, first_cache: Any, *, all_frames: bool, **_: object) -> Any:
            tiles = Tiles(side=_TILE_SIDE, overlap=_TILE_OVERLAP)
            return decode.decode_tiles(decode_frame, latents, first_cache, all_frames=all_frames, tiles=tiles)

        # As after a frame that does not fit in device memory, which a CPU does not say.
        video.decode_frames = decode_in_tiles  # type: ignore[assignment, attr-defined]
    if what == "generate":
        latents = pipeline.denoise(pipeline.encode("a red circle moving left", settings), settings)
    else:
        latents = torch.randn(pipeline.latent_shape(settings), generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as directory:
        paths = media.check_output(Path(directory) / "video.mp4", settings)
        described = artifacts.describe("", settings, pipeline)
        media.write_videos(paths, pipeline.decode(latents, settings), fps=settings.fps, metadata=[described])
    return Peak(what, frames, side, _peak_bytes(), latents.numel() * 4)


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        what, frames, side = arguments.run
        print(json.dumps(dataclasses.asdict(run(what, int(frames), int(side)))))
        return 0
    rows, failed = [], False
    for what in _SIZES:
        short, long = (_measure_again(what, frames) for frames in (SHORT, LONG))
        bounded = is_bounded(short, long)
        failed |= not bounded
        ratio = (long.peak_bytes - _LATENT_COPIES * long.latent_bytes) / short.peak_bytes
        print(
            f"{what:16} {short.size}²: {short.peak_bytes / 1e6:.0f} MB for {SHORT} frames, {long.peak_bytes / 1e6:.0f} "
            f"MB for {LONG}, latents {long.latent_bytes / 1e6:.1f} MB; ×{ratio:.2f} without them"
        )
        rows += [dataclasses.asdict(each) for each in (short, long)]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"factor": FACTOR, "peaks": rows}, indent=2) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
