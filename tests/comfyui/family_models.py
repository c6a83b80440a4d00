"""The example workflow of every family with a small random model in it, for a server's own folders."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.comfyui.client import ComfyClient, Prompt
from tests.comfyui.workflows import load_example, to_prompt
from tests.families import (
    small_animate,
    small_flux,
    small_flux2,
    small_hunyuan,
    small_hunyuan_image,
    small_ltx,
    small_ltx2,
    small_qwen_image,
    small_vace,
    small_z_image,
    wan_pipelines,
)
from tests.families.wan_pipelines import picture
from tests.pipeline.clips import write_video

RUNS = (
    ("wan21_tpu_basic.json", "demo"),
    ("wan21_tpu_image_to_video.json", "demo-image"),
    ("wan21_tpu_video_to_video.json", "demo"),
    ("wan22_tpu_basic.json", "small/pair"),
    ("wan22_tpu_image_to_video.json", "small/pair-from-images"),
    ("wan22_tpu_image_to_video.json", "small/5b"),
    ("wan22_tpu_second_pass.json", "small/pair"),
    ("wan_vace_tpu_basic.json", "small/vace"),
    ("wan_animate_tpu_basic.json", "small/animate"),
    ("flux_tpu_basic.json", "small/flux"),
    ("flux_tpu_image_to_image.json", "small/flux"),
    ("flux2_tpu_basic.json", "small/klein-base"),
    ("hunyuanvideo15_tpu_basic.json", "small/hunyuan"),
    ("hunyuanvideo15_tpu_image_to_video.json", "small/hunyuan-from-images"),
    ("ltxv_tpu_basic.json", "small/ltx"),
    ("ltxv_tpu_image_to_video.json", "small/ltx"),
    ("ltx2_tpu_basic.json", "small/ltx2"),
    ("ltx2_tpu_basic.json", "small/ltx23"),
    ("ltx2_tpu_image_to_video.json", "small/ltx2"),
    ("qwen_image_tpu_basic.json", "small/qwen-image"),
    ("qwen_image_tpu_edit.json", "small/qwen-image-edit"),
    ("z_image_tpu_basic.json", "small/z-image"),
    ("z_image_tpu_image_to_image.json", "small/z-image"),
)
"""Every family's example workflows, and a model that is small."""
DIRECTORIES: dict[str, Callable[[], Path]] = {
    "small/pair": lambda: wan_pipelines.directory("2.2"),
    "small/pair-from-images": lambda: wan_pipelines.directory("2.2 image"),
    "small/5b": lambda: wan_pipelines.directory("5B image"),
    "small/vace": small_vace.directory,
    "small/animate": small_animate.directory,
    "small/flux": lambda: small_flux.directory("dev"),
    "small/klein-base": lambda: small_flux2.directory("base"),
    "small/klein": lambda: small_flux2.directory("klein"),
    "small/hunyuan": small_hunyuan.directory,
    "small/hunyuan-from-images": small_hunyuan_image.directory,
    "small/ltx": small_ltx.directory,
    "small/ltx2": small_ltx2.directory,
    "small/ltx23": lambda: small_ltx2.directory(later=True),
    "small/qwen-image": lambda: small_qwen_image.directory("image"),
    "small/qwen-image-edit": lambda: small_qwen_image.directory("2511"),
    "small/z-image": lambda: small_z_image.directory("turbo"),
}
SIZE = {"height": 64, "width": 96}
OWN_SETTINGS = {name: {"max_sequence_length": 256} for name in ("small/ltx2", "small/ltx23")}
"""The sliding window of their small text encoder."""
VIDEOS = ("clip.mp4", "depth.mp4", "pose.mp4", "face.mp4")
"""The names in the example workflows, as example.png is."""


def write_models(base: Path) -> None:
    """All of them, and the images and videos that the examples load."""
    for name, made in DIRECTORIES.items():
        directory = base / "models" / "diffusers" / name
        shutil.copytree(made(), directory)
        # Below the widgets' smallest: such a model is drawn at its own size.
        (directory / "generation.json").write_text(json.dumps({**SIZE, **OWN_SETTINGS.get(name, {})}))
    write_inputs(base)


def write_inputs(base: Path) -> None:
    """The images and videos that the examples load."""
    (base / "input").mkdir(parents=True, exist_ok=True)
    picture(0).save(base / "input" / "example.png")
    for number, name in enumerate(VIDEOS):
        write_video(base / "input" / name, range(0, 17 * 40, 40), first=number)


def family_prompt(name: str, model: str, client: ComfyClient, **chosen: int) -> Prompt:
    prompt = to_prompt(load_example(name), client.object_info())
    values = {"model_id": model, "num_frames": 17, "num_inference_steps": 3, **chosen}
    for node in prompt.values():
        node["inputs"] |= {key: value for key, value in values.items() if key in node["inputs"]}
    return prompt
