"""The VAE by torchax and by Flax NNX: the same images, kept apart in memory, refused where it must be."""

import sys
from typing import Any

import pytest
import torch
from PIL import Image

from comfy_tpu.compiler.residency import Residency
from comfy_tpu.config import DEMO_IMAGE_MODEL, ResidencyConfig, RuntimeConfig
from comfy_tpu.errors import InvalidValueError, UnsupportedError
from comfy_tpu.families.flux import model as flux_model
from comfy_tpu.families.hunyuan_video import model as hunyuan_model
from comfy_tpu.families.wan import model as wan_model
from comfy_tpu.pipeline.progress import Progress
from comfy_tpu.pipeline.vae_backend import check_vae_backend
from comfy_tpu.pipeline.video import VideoPipeline
from tests.closeness import psnr


def opened(backend: Any, model: str = "demo", **options: Any) -> VideoPipeline:
    return VideoPipeline.open(model, RuntimeConfig(mesh="single", vae_backend=backend), **options)


@pytest.mark.slow  # the decoder by default: tests/nnx
def test_the_same_video() -> None:
    residency = Residency(ResidencyConfig())
    said: list[Progress] = []
    by_torchax, by_nnx = (opened(name, residency=residency, on_progress=said.append) for name in ("torchax", "nnx"))
    settings = by_torchax.settings(num_frames=9, num_inference_steps=4)
    embeddings = by_torchax.encode("a red circle moving right on a black background", settings)
    latents = by_torchax.denoise(embeddings, settings)
    # In turns over one registry: weights of one layout must not be taken for those of the other.
    videos = [torch.cat(list(pipeline.decode(latents, settings)), dim=1) for pipeline in (by_torchax, by_nnx) * 2]
    assert videos[0].std() > 0.05, "something is to be seen"
    assert psnr(videos[1], videos[0]) >= 120, "143 are found"
    assert torch.equal(videos[0], videos[2])
    assert torch.equal(videos[1], videos[3])
    programs = {progress.label.split()[0] for progress in said if progress.stage == "compiling"}
    assert {"vae.decode_frame", "vae_nnx.decode_frame"} <= programs


@pytest.mark.slow
def test_the_same_latents_of_an_image() -> None:
    image = Image.effect_noise((64, 64), 80).convert("RGB")
    latents = []
    for backend in ("torchax", "nnx"):
        pipeline = opened(backend, DEMO_IMAGE_MODEL)
        settings = pipeline.settings(num_frames=9)
        latents.append(pipeline.encode_media([image], settings)["condition"])
    assert torch.allclose(latents[1], latents[0], atol=1e-3)


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        (flux_model.FLUX_SCHNELL, {}, "vae_backend=nnx: the VAE of Flux.* has no such implementation; choose torchax"),
        (
            hunyuan_model.HUNYUAN15,
            {},
            "vae_backend=nnx: the VAE of Hunyuan.* has no such implementation; choose torchax",
        ),
        (wan_model.WAN22_5B, {"is_residual": True, "patch_size": 2}, "as in Wan 2.2 5B, is not written in Flax NNX"),
    ],
)
def test_other_vaes_are_refused(family: Any, config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        check_vae_backend("nnx", family, lambda: config)
    check_vae_backend("torchax", family, lambda: config)


def test_without_flax(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("comfy_tpu.families.wan.nnx_vae.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flax", None)
    with pytest.raises(UnsupportedError, match=r"needs flax, which is not installed; run `"):
        opened("nnx")
    opened("torchax")


def test_unknown_backend() -> None:
    with pytest.raises(InvalidValueError, match="vae_backend='flax' is unknown; choose from torchax, nnx, tiny"):
        opened("flax")
