"""comfy-tpu interpolate: a video with more frames per second, from a finished one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from comfy_tpu.cli import options
from comfy_tpu.cli.device_start import start_devices
from comfy_tpu.cli.terminal import print_paths
from comfy_tpu.config import GenerationSettings, Interpolation
from comfy_tpu.errors import InvalidValueError

if TYPE_CHECKING:
    import torch

    from comfy_tpu.pipeline.video_files import VideoSource

_FPS_MAX = 240


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "video",
        metavar="VIDEO",
        type=options.path_parser("VIDEO"),
        help="a video file, an animation, or a directory of numbered images",
    )
    parser.add_argument(
        "--factor",
        dest="interpolate",
        type=options.number_parser(int),
        default=2,
        metavar="N",
        help="times as many frames per second, from 2 to 8 (2)",
    )
    options.add_interpolation_model(parser, "--model")
    parser.add_argument(
        "--fps",
        type=options.number_parser(int),
        metavar="N",
        help="frames per second at which VIDEO is read (default: its own, as a whole number)",
    )
    options.add_video_output(parser, "clip-2x.mp4 beside clip.mp4; clip-2x-1.mp4 and so on if it is taken")
    options.add_report(parser)
    options.add_single_device(parser)


def run(arguments: argparse.Namespace) -> int:
    from comfy_tpu.config import CacheConfig
    from comfy_tpu.pipeline import media
    from comfy_tpu.pipeline.interpolation import Interpolator, check_interpolation, read_interpolation
    from comfy_tpu.pipeline.sound_files import read_sound
    from comfy_tpu.pipeline.video_files import open_video

    chosen = read_interpolation(arguments.interpolate, arguments.interpolation_model)
    assert chosen is not None
    source = open_video(arguments.video, "video")
    fps = _choose_fps(source, arguments.video, arguments.fps)
    check_interpolation(chosen, makes_images=False, fps=fps, fps_max=_FPS_MAX)
    count = source.count(fps)
    frames = (count - 1) * chosen.factor + 1
    path = _check_outputs(arguments, chosen, source.size, frames)
    sound = read_sound(arguments.video, "video", begin=source.begin, seconds=count / fps)
    start_devices(arguments.platform)
    interpolator = Interpolator(chosen, arguments.platform, CacheConfig(directory=arguments.cache_dir))
    media.write_videos(
        [path],
        interpolator.interpolate(_read(source, fps, count)),
        fps=fps * chosen.factor,
        metadata=[{"interpolation": interpolator.fingerprint}],
        sheet=arguments.contact_sheet,
        sound=None if sound is None else sound.fitted(count / fps),
    )
    if arguments.json:
        print(json.dumps({"schema": 1, "outputs": [str(path)], "frames": frames, "fps": fps * chosen.factor}))
    else:
        print_paths([path])
    return 0


def _check_outputs(arguments: argparse.Namespace, chosen: Interpolation, size: tuple[int, int], frames: int) -> Path:
    """The path of the video. Raises InvalidValueError for what could not be written, before a frame is made."""
    from comfy_tpu.pipeline import media
    from comfy_tpu.pipeline.path_conflicts import check_conflicts

    output, sheet = arguments.output, arguments.contact_sheet
    if output is None:
        output = media.free_output(_name_output(arguments.video, chosen.factor), 1)
    width, height = size
    (path,) = media.check_output(output, GenerationSettings(height=height, width=width, num_frames=frames))
    if sheet is not None:
        media.check_contact_sheet(sheet)
    outputs = [("output", path), *([] if sheet is None else [("contact_sheet", sheet)])]
    check_conflicts(outputs, [arguments.video, chosen.model])
    return path


def _name_output(video: Path, factor: int) -> Path:
    """clip-2x.mp4 beside clip.mp4; of a directory such as `.` by the name that it has elsewhere."""
    named = video.resolve() if video.name in ("", "..") else video
    return named.parent / f"{named.stem or 'video'}-{factor}x.mp4"


def _choose_fps(source: VideoSource, path: Path, chosen: int | str | None) -> int:
    """The frames per second at which a video is read. Raises InvalidValueError where they are not known."""
    if source.is_picture or source.pictures < 2:
        raise InvalidValueError(f"video={path} is one picture; give a video of two frames or more", field="video")
    if chosen is not None:
        if not isinstance(chosen, int) or not 1 <= chosen <= _FPS_MAX:
            raise InvalidValueError(f"fps={chosen} is not a whole number from 1 to {_FPS_MAX}", field="fps")
        return chosen
    if not source.seconds:
        raise InvalidValueError(
            f"fps is missing: {path} has no times, as a video file has; give the frames per second", field="fps"
        )
    return max(1, round(source.pictures / source.seconds))


def _read(source: VideoSource, fps: int, count: int) -> Iterator[torch.Tensor]:
    """One frame at a time, [1, 1, height, width, 3] in 0..1."""
    import numpy as np
    import torch

    from comfy_tpu.cli.progress import Display
    from comfy_tpu.pipeline.progress import Progress

    with Display() as display:
        for number, image in enumerate(source.frames(fps)):
            yield torch.from_numpy(np.array(image)).float().div(255)[None, None]
            display(Progress("interpolating", "", number + 1, count, size=Path(source.name).name))
