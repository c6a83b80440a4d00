"""A tiny decoder in a pipeline: frames and previews by it, the VAE's kept apart, and files that do not fit refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from comfy_tpu.cli.main import main
from comfy_tpu.cli.preview_file import PreviewFile
from comfy_tpu.compiler.residency import Residency
from comfy_tpu.config import ResidencyConfig, RuntimeConfig
from comfy_tpu.errors import CheckpointError, ComfyTpuError, InvalidValueError
from comfy_tpu.pipeline import video
from comfy_tpu.pipeline.embeddings import PromptEmbeddings
from comfy_tpu.pipeline.model_files import DEMO_DIRECTORY, ModelFiles
from comfy_tpu.pipeline.preview_images import ColourPreviews
from comfy_tpu.pipeline.progress import Progress
from comfy_tpu.pipeline.tiny_previews import TinyPreviews
from comfy_tpu.pipeline.tiny_vae import choose_tiny_vae
from comfy_tpu.pipeline.video import VideoPipeline
from tests.closeness import SAME, psnr
from tests.families import small_flux2
from tests.families import small_tiny_decoders as small

TENSORS = small.video_tensors(16)
LATENTS = torch.randn(2, 16, 3, 6, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return small.save(tmp_path / "taew2_1.safetensors", TENSORS)


def opened(path: Path | None, backend: Any = "tiny", model: str | Path = "demo", **options: Any) -> VideoPipeline:
    return VideoPipeline.open(model, RuntimeConfig(mesh="single", vae_backend=backend, tiny_vae=path), **options)


@pytest.mark.thorough  # by default: tests/families/test_tiny_decoders.py
def test_frames_and_previews(path: Path, tmp_path: Path) -> None:
    pipeline = opened(path)
    settings = pipeline.settings(height=48, width=32, num_frames=9, num_videos=2)
    frames = torch.cat(list(pipeline.decode(LATENTS, settings)), dim=1)
    for row in range(2):
        expected = small.decode_video(TENSORS, LATENTS[row : row + 1])
        assert psnr(frames[row : row + 1], expected) >= SAME
    assert pipeline.tiny_vae
    assert pipeline.part_count(3) == 3
    assert isinstance(pipeline.previews, TinyPreviews)
    first = LATENTS[:1]
    shown = [np.asarray(image) for image in pipeline.previews.render(first, range(1, 3))]
    expected = small.decode_video(TENSORS, first)[0, [4, 8]].mul(255).round().byte().numpy()
    assert np.abs(np.stack(shown).astype(int) - expected).max() <= 1
    preview = PreviewFile(tmp_path / "p.png", pipeline)
    preview(Progress("denoising", "", 1, 2, preview=lambda row=0: first))
    with Image.open(tmp_path / "p.png") as image:
        assert image.size == (32 * 6, 48 * 6)
        assert np.array_equal(np.asarray(image)[::6, ::6], shown[0])


def test_without_a_decoder_previews_are_colours(tmp_path: Path) -> None:
    pipeline = opened(None, "torchax")
    assert isinstance(pipeline.previews, ColourPreviews)
    preview = PreviewFile(tmp_path / "p.gif", pipeline)
    preview(Progress("denoising", "", 1, 2, preview=lambda row=0: LATENTS[:1]))
    with Image.open(tmp_path / "p.gif") as image:
        assert image.n_frames == 3
        assert image.size == (4 * 43, 6 * 43)
    pipeline.files.__dict__["preview_colours"] = None
    pipeline.__dict__.pop("previews")
    with pytest.raises(InvalidValueError, match="preview needs a tiny decoder, because demo has no preview.json"):
        PreviewFile(tmp_path / "p.gif", pipeline)


@pytest.mark.parametrize(("flags", "milliseconds"), [([], 500), (["--fps", "16"], 250)])
def test_previews_are_as_fast_as_the_video(
    flags: list[str], milliseconds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denoise(self: VideoPipeline, *given: Any, **more: Any) -> torch.Tensor:
        self.on_progress(Progress("denoising", "", 1, 2, preview=lambda row=0: LATENTS[:1]))
        raise InvalidValueError("the preview is written")

    monkeypatch.setattr(VideoPipeline, "encode", lambda *given: PromptEmbeddings("", {}, None, ""))
    monkeypatch.setattr(VideoPipeline, "denoise", denoise)
    output = ["-o", str(tmp_path / "x.mp4"), "--preview", str(tmp_path / "p.gif")]
    assert main(["generate", "a red circle", *output, *flags]) == 1
    with Image.open(tmp_path / "p.gif") as image:
        assert image.info["duration"] == milliseconds


@pytest.mark.slow
def test_previews_do_not_change_the_result(path: Path) -> None:
    """Weights of the decoder and the VAE are beside each other in one registry."""
    residency = Residency(ResidencyConfig())
    made = []
    for given, backend in ((None, "torchax"), (path, "torchax"), (path, "tiny")):
        pipeline = opened(given, backend, residency=residency)
        settings = pipeline.settings(num_frames=5, num_inference_steps=2)
        embeddings = pipeline.encode("a red circle", settings)
        seen: list[Any] = []

        def watch(progress: Progress, pipeline: VideoPipeline = pipeline, seen: list[Any] = seen) -> None:
            if progress.preview is not None and pipeline.previews is not None:
                seen += pipeline.previews.render(progress.preview(), range(2))

        pipeline.on_progress = watch
        latents = pipeline.denoise(embeddings, settings)
        assert len(seen) == 4
        made.append((latents, torch.cat(list(pipeline.decode(latents, settings)), dim=1)))
    assert torch.equal(made[0][0], made[1][0])
    assert torch.equal(made[0][1], made[1][1])
    assert torch.equal(made[0][0], made[2][0])
    assert psnr(made[2][1], small.decode_video(TENSORS, made[0][0])) >= SAME


def test_the_file_of_the_model_directory(path: Path) -> None:
    for part in DEMO_DIRECTORY.iterdir():
        path.with_name(part.name).symlink_to(part)
    files = ModelFiles.open(path.parent)
    chosen = choose_tiny_vae(RuntimeConfig(vae_backend="tiny"), files)
    assert chosen is not None
    assert chosen.path == path
    assert choose_tiny_vae(RuntimeConfig(), files) is None
    small.save(path.with_name("lighttaew2_1.safetensors"), TENSORS)
    with pytest.raises(InvalidValueError, match="tiny_vae is missing: .* and 2 such files are in"):
        choose_tiny_vae(RuntimeConfig(vae_backend="tiny"), files)


@pytest.mark.slow  # the decoder by default: tests/families/test_tiny_decoders.py
def test_flux2(tmp_path: Path) -> None:
    channels = VideoPipeline.open(small_flux2.directory("dev"), RuntimeConfig(mesh="single")).files.latent_channels
    tensors = small.image_tensors(channels // 4, pools=True)
    pipeline = opened(small.save(tmp_path / "taef2.safetensors", tensors), model=small_flux2.directory("dev"))
    latents = torch.randn(1, channels, 1, 4, 4)
    (frames,) = pipeline.decode(latents, pipeline.latent_settings(latents))
    assert psnr(frames, small.decode_image(tensors, latents, patch=2)) >= SAME


@pytest.mark.parametrize(
    ("tensors", "kind", "message"),
    [
        (small.video_tensors(48, patch=2), InvalidValueError, "decodes latents of 48 channels, 16 × 16 pixels and 4"),
        (small.video_tensors(16, strides=(1, 1, 2)), InvalidValueError, "16 channels, 8 × 8 pixels and 2 frames, and"),
        (small.image_tensors(16), InvalidValueError, "decodes single images, and demo makes videos; use a file of"),
        ({"x": torch.zeros(1)}, CheckpointError, "holds no tiny decoder: it has x; use a safetensors file of taesd"),
    ],
    ids=["channels", "frames", "images", "other"],
)
def test_files_that_do_not_fit(
    tensors: small.Tensors,
    kind: type[ComfyTpuError],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(video, "make_placement", lambda *arguments, **more: pytest.fail("devices were started"))
    with pytest.raises(kind, match=message) as caught:
        opened(small.save(tmp_path / "x.safetensors", tensors))
    assert caught.value.field == "tiny_vae"
    assert str(caught.value).startswith(f"tiny_vae={tmp_path / 'x.safetensors'}")


def test_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(video, "make_placement", lambda *arguments, **more: pytest.fail("devices were started"))
    with pytest.raises(InvalidValueError, match="tiny_vae is missing: vae_backend=tiny decodes by a file such as"):
        opened(None)
    (tmp_path / "x.pth").write_bytes(b"")
    with pytest.raises(CheckpointError, match="such files are pickles"):
        opened(tmp_path / "x.pth")


def test_a_tensor_of_another_shape(tmp_path: Path) -> None:
    tensors = {**TENSORS, "decoder.10.conv.2.bias": torch.zeros(3)}
    pipeline = opened(small.save(tmp_path / "x.safetensors", tensors))
    with pytest.raises(CheckpointError, match=r"(?s)tiny_vae=.*x.safetensors: .*decoder\.10\.conv\.2\.bias"):
        pipeline.decode(LATENTS, pipeline.settings(height=48, width=32, num_frames=9, num_videos=2))
