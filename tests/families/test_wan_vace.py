"""Wan VACE against diffusers' pipeline: videos, masks, references and strengths; and what is refused of them."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from comfy_tpu.bridge import to_host
from comfy_tpu.cli import main as cli
from comfy_tpu.compiler.cache import count_compilations
from comfy_tpu.config import RuntimeConfig
from comfy_tpu.errors import InvalidValueError, UnsupportedError
from comfy_tpu.families.wan import vace
from comfy_tpu.families.wan.lora import lora_names
from comfy_tpu.pipeline import artifacts
from comfy_tpu.pipeline.given_media import GivenMedia
from comfy_tpu.pipeline.video import VideoPipeline
from comfy_tpu.pipeline.video_files import Frames
from tests.closeness import SAME, assert_wrong_ones_differ, psnr
from tests.covering import covering
from tests.families import small_vace
from tests.families.meshes import MESHES
from tests.families.pieces import component
from tests.families.small_vace import CASES, KINDS, clip, given, mask
from tests.pipeline.clips import picture, write_images, write_odd_videos
from tests.pipeline.test_video import PROMPT
from tests.tracing import relative_error

CHOSEN: dict[str, Any] = {
    "num_frames": 9,
    "num_inference_steps": 3,
    "guidance_scale": 4.0,
    "guidance_scale_2": 2.5,
    "flow_shift": 3.0,
    "seed": 7,
    "negative_prompt": "blue background",
    "max_sequence_length": 32,
}
SIZES = ((64, 96), (48, 80))
VIDEO_SIZES = {(64, 96): (150, 100), (48, 80): (80, 48)}
"""Width and height of given videos, by that of the result, whose shape they have: diffusers keeps a video's own shape,
and scales it down only."""


@functools.cache
def opened(kind: str, mesh: str) -> VideoPipeline:
    return VideoPipeline.open(small_vace.directory(kind), RuntimeConfig(mesh=mesh))


def settings(pipeline: VideoPipeline, height: int, width: int, **changed: Any) -> Any:
    chosen = CHOSEN | {"height": height, "width": width} | changed
    if not pipeline.has_two_transformers:
        chosen.pop("guidance_scale_2")
    return pipeline.settings(**chosen)


def video(kind: str, mesh: str, size: tuple[int, int], media: GivenMedia, **changed: Any) -> torch.Tensor:
    pipeline = opened(kind, mesh)
    frames = pipeline.generate(PROMPT, settings(pipeline, *size, **changed), media)
    return torch.cat(list(frames), dim=1)


@functools.cache
def expected(kind: str, size: tuple[int, int], case: str) -> torch.Tensor:
    inputs = small_vace.diffusers_inputs(case, VIDEO_SIZES[size])
    return small_vace.run(kind, *size, {**CHOSEN, "prompt": PROMPT}, **inputs)


@pytest.mark.thorough  # by default: the transformer, below
@covering(
    "kind, mesh, size, case",
    KINDS,
    (*MESHES, "auto"),
    SIZES,
    CASES,
    strength=0,
    always=[("2.1", "single", SIZES[0], "everything")],
)
def test_the_video_is_that_of_diffusers(kind: str, mesh: str, size: tuple[int, int], case: str) -> None:
    wanted = expected(kind, size, case)
    assert wanted.std() > 0.02
    assert psnr(video(kind, mesh, size, given(case, size=VIDEO_SIZES[size])), wanted) >= SAME


@pytest.mark.slow
def test_the_comparison_would_see_another_request() -> None:
    size, case = SIZES[0], "everything"
    right = given(case)

    def made(**changed: Any) -> torch.Tensor:
        return video("2.1", "single", size, dataclasses.replace(right, **changed))

    white = Frames(np.full((9, 100, 150, 3), 255, np.uint8))
    assert_wrong_ones_differ(
        expected("2.1", size, case),
        SAME - 10,
        video=made(videos={**right.videos, "video": Frames(clip(1))}),
        mask=made(videos={**right.videos, "mask": white}),
        reference=made(references=tuple(small_vace.pictures(2)[1:])),
        strength=made(control_strength=(0.7,)),
    )


# One row for every branch of guidance, and each axis of the mesh more than once.
@pytest.mark.parametrize(
    ("mesh", "dtype", "least"),
    [
        ("dp=2,sp=2,tp=2", torch.float32, 1e-4),
        pytest.param("sp=8", torch.float32, 1e-4, marks=pytest.mark.slow),
        pytest.param("single", torch.bfloat16, 2e-2, marks=pytest.mark.slow),
    ],
)
def test_the_transformer_is_that_of_diffusers(mesh: str, dtype: torch.dtype, least: float) -> None:
    generator = torch.Generator().manual_seed(1)
    latents, text = (torch.randn(*shape, generator=generator) for shape in ((2, 4, 4, 6, 10), (2, 32, 16)))
    control = torch.randn(2, small_vace.CONFIG["vace_in_channels"], 4, 6, 10, generator=generator)
    scale = torch.tensor([[0.4, 1.3]]).expand(2, 2)
    reference = small_vace.reference().transformer
    wanted = reference(
        latents,
        torch.tensor([700.0, 700.0]),
        text,
        control_hidden_states=control,
        control_hidden_states_scale=scale[0],
        return_dict=False,
    )[0]
    transformer, weights = component(opened("2.1", "single"), vace.TRANSFORMER, mesh, dtype)
    given_inputs = {"text": text, "control": control, "control_scale": scale}
    prepare = transformer.program(vace.prepare, output_axes=vace.PROMPT_AXES)
    prepared = dict(prepare(weights, **given_inputs))
    keys = {name: prepared.pop(name) for name in list(prepared) if "." in name}
    velocity = transformer.program(vace.predict, input_axes={"latents": ("dp",)})(
        {**weights, **keys},
        latents=latents,
        timestep=torch.tensor([700.0]),
        guidance_scale=torch.tensor(1.0),
        **prepared,
    )
    assert relative_error(to_host(velocity), wanted) <= least


@pytest.mark.slow
def test_the_first_and_the_last_frame() -> None:
    """As the example of diffusers' pipeline makes a video and a mask of them, with the gray between 127 and 128."""
    size = SIZES[0]
    ends = [Image.fromarray(clip(seed, 1)[0]) for seed in (1, 2)]
    fitted = [np.asarray(each.resize((96, 64), Image.Resampling.LANCZOS)) / 255 for each in ends]
    frames = np.full((9, 64, 96, 3), 0.5)
    frames[0], frames[-1] = fitted
    masks = [Image.new("L", (96, 64), 0 if number in (0, 8) else 255) for number in range(9)]
    wanted = small_vace.run("2.1", *size, {**CHOSEN, "prompt": PROMPT}, video=list(frames), mask=masks)
    assert psnr(video("2.1", "single", size, GivenMedia(tuple(ends))), wanted) >= SAME


@pytest.mark.slow
def test_a_shorter_video_is_continued() -> None:
    size, frames, masks = SIZES[0], clip(size=(96, 64)), mask(size=(96, 64))
    longer = np.concatenate((frames[:6] / 255, np.full((3, 64, 96, 3), 0.5)))
    all_masks = [Image.fromarray(each) for each in masks[:6]] + [Image.new("L", (96, 64), 255)] * 3
    wanted = small_vace.run("2.1", *size, {**CHOSEN, "prompt": PROMPT}, video=list(longer), mask=all_masks)
    videos = {"video": Frames(frames[:6]), "mask": Frames(np.repeat(masks[:6, ..., None], 3, axis=3))}
    assert psnr(video("2.1", "single", size, GivenMedia(videos=videos)), wanted) >= SAME


@pytest.mark.thorough  # by default: that of Wan, test_wan.py
def test_another_prompt_mask_or_strength_compiles_nothing() -> None:
    pipeline, size = opened("2.1", "single"), SIZES[0]
    first = video("2.1", "single", size, given("everything"))
    whole = {**given("everything").videos, "mask": Frames(np.full((1, 100, 150, 3), 255, np.uint8), is_picture=True)}
    with count_compilations() as count:
        media = dataclasses.replace(given("everything", 3), videos=whole, control_strength=(0.2, 0.7))
        frames = torch.cat(list(pipeline.generate("a blue circle", settings(pipeline, *size), media)), dim=1)
        assert not torch.equal(frames, first)
    assert count.requested == 0


@pytest.mark.slow
def test_stages_hand_the_control_on(tmp_path: Path) -> None:
    pipeline = opened("2.1", "single")
    chosen = settings(pipeline, *SIZES[0])
    path = tmp_path / "text.safetensors"
    media = given("strengths of layers")
    artifacts.save_text(path, pipeline.encode(PROMPT, chosen, media), chosen, pipeline)
    embeddings, header = artifacts.load_text(path, pipeline)
    assert header.images_fingerprint == media.fingerprint
    latents = pipeline.denoise(embeddings, chosen)
    assert latents.shape == pipeline.latent_shape(chosen), "without those of the references"
    assert torch.equal(
        torch.cat(list(pipeline.decode(latents, chosen)), dim=1), video("2.1", "single", SIZES[0], media)
    )
    other = settings(pipeline, 64, 64)
    with pytest.raises(InvalidValueError, match="the image was encoded for other sizes: control has shape"):
        pipeline.denoise(embeddings, other)


@pytest.mark.slow
def test_previews_show_the_video_without_its_references() -> None:
    pipeline = opened("2.1", "single")
    shown: list[torch.Tensor] = []
    pipeline.on_progress = lambda progress: shown.append(progress.preview()) if progress.preview else None
    chosen = settings(pipeline, *SIZES[0])
    pipeline.denoise(pipeline.encode(PROMPT, chosen, given("references")), chosen)
    assert [tuple(each.shape) for each in shown] == [(1, 4, 3, 8, 12)] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mask", "clip.mp4"], "--mask is given without video; give video too, or leave mask out"),
        (
            ["--video", "clip.mp4", "--mask", "short.mp4"],
            "--mask has 4 frames and video 9; give as many, or one picture",
        ),
        (
            ["--video", "clip.mp4", "--mask", "wide.png"],
            "--mask is 96×32 and video 64×48; give a mask of the same size",
        ),
        (
            ["--video", "clip.mp4", "--image", "wide.png"],
            "--image is given beside video, whose frames it would replace",
        ),
        (["--pose-video", "clip.mp4"], "--pose-video is given, but model {model} takes mask and video; leave it out"),
        (["--reference", "wide.png"] * 5, "--reference is given 5 times, but model {model} takes 4 at most"),
        (["--reference", "clip.mp4"], "--reference clip.mp4 cannot be read as an image"),
        (["--control-strength", "1,2,3"], "--control-strength has 3 numbers, and the model's control 2 layers"),
        (["--control-strength", "-1"], "--control-strength -1.0 is no number from 0 to 10"),
        (["--strength", "0.5", "--video", "clip.mp4"], "--strength 0.5 is for an image or a video that denoising"),
        (["--video", "song.mp4"], "--video song.mp4 holds sound only; give a file with moving pictures"),
        (["--video", "empty.mkv"], "--video empty.mkv has no frames; give another video"),
        (["--video", "wide.txt"], "--video wide.txt cannot be read as a video"),
        (["--mask", "x", "--video", "clip.mp4"], "--mask has 3 frames and video 9"),
        (["--mask", "one.mp4", "--video", "clip.mp4"], "--mask has 1 frame and video 9; give as many, or one picture"),
        (["--mask", "uneven.mp4", "--video", "clip.mp4"], "--mask has 18 frames and video 9; give as many"),
        (["--mask", "turned.mp4", "--video", "clip.mp4"], "--mask is 48×64 and video 64×48; give a mask of the same"),
        (["--mask", "clip.mp4", "--video", "turned.mp4"], "--mask is 64×48 and video 48×64; give a mask of the same"),
        (["--mask", "song.mp4", "--video", "clip.mp4"], "--mask song.mp4 holds sound only; give a file with moving"),
        (["--mask", "empty.mkv", "--video", "clip.mp4"], "--mask empty.mkv has no frames; give another video"),
        (["--mask", "clip.mp4", "--mask", "clip.mp4", "--video", "clip.mp4"], "--mask is given 2 times; give one"),
        (["--video", "oblique.mp4"], "--video oblique.mp4 is turned by its metadata, and not by a multiple of 90"),
        (["--video", "mixed"], "--video mixed holds frame_008.png of 96×32 beside images of 64×48; give images of one"),
        (["--num-frames", "8", "--video", "clip.mp4"], "--num-frames 8 is not 4n+1; use 5 or 9"),
        (["--reference", "gone.png"], "--reference gone.png is not a file; give an image such as first.png"),
        (["--reference", "mixed"], "--reference mixed is not a file; give an image such as first.png"),
    ],
)
def test_what_is_refused_before_a_weight_is_loaded(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    write_odd_videos(tmp_path)
    write_images(tmp_path / "x", 3)
    picture(8, (96, 32)).save(write_images(tmp_path / "mixed", 8) / "frame_008.png")
    picture(3, (96, 32)).save(tmp_path / "wide.png")
    (tmp_path / "wide.txt").write_text("no video")
    model = str(small_vace.directory())
    command = ["generate", PROMPT, "--model", model, "--mesh", "single", "--height", "48", "--width", "64"]
    monkeypatch.setattr("comfy_tpu.pipeline.running_model.RunningModel.weights", lambda *_: pytest.fail("loaded"))
    assert cli.main([*command, "--steps", "3", "--fps", "25", "--num-frames", "9", *arguments]) == 1
    assert message.format(model=model) in " ".join(capsys.readouterr().err.split())


def test_layers_at_other_places_are_refused() -> None:
    config = {**small_vace.reference().transformer.config, "vace_layers": [0, 3]}
    with pytest.raises(UnsupportedError, match="reads its control in the layers 0, 3 of 4, expected every"):
        vace.build_transformer({name: value for name, value in config.items() if not name.startswith("_")})


def test_loras_find_the_modules_of_the_control() -> None:
    names = {module: set(lora_names(module, (8, 8))) for module in ("vace_proj_in", "vace_blocks.1.proj_out")}
    assert names["vace_proj_in"] == {"vace_blocks.0.before_proj", "vace_blocks.0.proj_in"}
    assert names["vace_blocks.1.proj_out"] == {"vace_blocks.1.after_proj"}
    assert set(lora_names("vace_blocks.1.attn1.to_q", (8, 8))) == {"vace_blocks.1.self_attn.q"}


@pytest.mark.slow  # by default: those of an image, tests/pipeline/test_continuation.py
def test_windows_have_their_own_frames_of_the_control() -> None:
    pipeline = opened("2.1", "single")
    chosen = settings(
        pipeline, 48, 80, num_frames=33, context="static", context_frames=17, context_overlap=0, num_inference_steps=1
    )

    def latents(frames: np.ndarray) -> torch.Tensor:
        embeddings = pipeline.encode(PROMPT, chosen, GivenMedia(videos={"video": Frames(frames)}))
        return pipeline.denoise(embeddings, chosen)

    frames = clip(frames=33, size=(80, 48))
    changed = np.concatenate((frames[:21], 255 - frames[21:]))
    first, second = latents(frames), latents(changed)
    assert torch.equal(first[:, :, :4], second[:, :, :4]), "of the first window alone"
    assert (first[:, :, 6:] - second[:, :, 6:]).abs().amax() > 1e-3


def test_references_are_for_videos_that_are_made_whole() -> None:
    pipeline = opened("2.1", "single")
    chosen = settings(pipeline, 48, 80, num_frames=33, context="static", context_frames=17)
    media = GivenMedia(references=tuple(small_vace.pictures(1)))
    with pytest.raises(InvalidValueError, match="reference is for videos that are made whole, and 33 frames"):
        pipeline.encode(PROMPT, chosen, media)
