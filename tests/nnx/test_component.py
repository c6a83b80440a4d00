"""The Flax VAE where a pipeline would run it: a part at a time, its programs, its checkpoints, what it refuses."""

import dataclasses
import functools
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.vae import whole_videos
from comfy_tpu.bridge import to_host
from comfy_tpu.compiler.checkpoint import Checkpoint
from comfy_tpu.compiler.component import Component
from comfy_tpu.compiler.program import ProgramEvent
from comfy_tpu.config import MeshSizes
from comfy_tpu.distribution import install_command
from comfy_tpu.errors import CheckpointError, InvalidValueError, UnsupportedError
from comfy_tpu.families.wan import model as wan_model
from comfy_tpu.families.wan import vae as wan_vae
from comfy_tpu.families.wan.nnx_vae import decoding, vae_component
from comfy_tpu.parallel.mesh import abstract_placement, make_placement
from comfy_tpu.pipeline.decode import decode_frames
from tests.lowering import array, facts
from tests.nnx.small_vaes import four_levels, random, tiny
from tests.parity.small_models import SmallModel
from tests.tracing import relative_error

WIDTH = (None, None, None, None, ("dp", "sp", "tp"))


def component_of(model: SmallModel, mesh: str = "single") -> Any:
    return vae_component(model.config, make_placement(mesh), dtype=torch.float32)


def _called(program: Any, weights: Any, latent: Any, cache: Any) -> Any:
    return program(weights, latent=latent, cache=cache)


@pytest.mark.slow  # by default: tests/nnx/test_parity.py
@pytest.mark.parametrize("mesh", ["single", "dp=2,sp=4"])
def test_decodes_in_the_place_of_the_torch_module(mesh: str) -> None:
    """The pipeline's own loop, once with each. Two programs: the cache has its full size from the first frame on."""
    latents = random(1, 4, 4, 3, 5)
    frames, compiled = {}, {}
    for name, component, function, axes in (
        ("flax", component_of(tiny(), mesh), decoding.decode_frame, decoding.DECODE_FRAME_AXES),
        (
            "torch",
            Component(wan_vae.VAE, tiny().config, make_placement(mesh), dtype=torch.float32),
            wan_vae.decode_frame,
            {"latent": WIDTH, "cache": WIDTH},
        ),
    ):
        weights = component.load(Checkpoint.open(tiny().checkpoint))
        events: list[ProgramEvent] = []
        program = component.program(function, input_axes=axes, donate=("cache",), on_event=events.append)
        decode = functools.partial(_called, program, weights)
        parts = decode_frames(decode, latents, tiles=wan_model.WAN21.vae.tiles)
        frames[name] = torch.cat(list(parts), dim=1)
        compiled[name] = sum(event.stage == "ready" for event in events)
    assert frames["flax"].shape == (1, 13, 12, 20, 3)
    assert relative_error(frames["flax"], frames["torch"]) <= 1e-4
    assert compiled == {"flax": 2, "torch": 2}


@pytest.mark.slow  # by default: tests/nnx/test_parity.py
def test_encodes_in_the_place_of_the_torch_module() -> None:
    video = random(1, 3, 9, 12, 20).clamp(-1, 1)
    parts = [video[:, :, :1], video[:, :, 1:5], video[:, :, 5:]]
    latents = {}
    for name, component, function in (
        ("flax", component_of(tiny()), decoding.encode_frames),
        (
            "torch",
            Component(wan_vae.VAE, tiny().config, make_placement("single"), dtype=torch.float32),
            wan_vae.encode_frames,
        ),
    ):
        weights = component.load(Checkpoint.open(tiny().checkpoint))
        program, cache = component.program(function, donate=("cache",)), None
        found = []
        for pixels in parts:
            latent, cache = program(weights, pixels=pixels, cache=cache)
            found.append(to_host(latent))
        latents[name] = torch.cat(found, dim=2)
    assert latents["flax"].shape == (1, 4, 3, 3, 5)
    assert relative_error(latents["flax"], latents["torch"]) <= 1e-4


def test_columns_are_split_over_the_whole_mesh() -> None:
    component = component_of(tiny(), "dp=2,sp=2,tp=2")
    program = component.program(decoding.decode, input_axes=decoding.DECODE_AXES)
    weights = component.load(Checkpoint.open(tiny().checkpoint))
    pixels = program(weights, latents=random(1, 2, 3, 16, 4))
    assert {shard.data.shape for shard in pixels.addressable_shards} == {(1, 5, 12, 8, 3)}
    assert len({shard.index[3].start for shard in pixels.addressable_shards}) == 8


@pytest.mark.slow
def test_scanned_the_program_does_not_grow_with_the_video() -> None:
    component = component_of(tiny())
    weights = component.abstract_weights()

    def lines(function: Any, latents: int) -> int:
        lowered = component.program(function).lower(weights, latents=random(1, latents, 3, 5, 4))
        return len(lowered.as_text().splitlines())

    assert lines(decoding.decode, 9) == lines(decoding.decode, 3)
    assert lines(decoding.decode_unrolled, 9) > 2 * lines(decoding.decode_unrolled, 3)


@pytest.mark.slow
def test_scanned_the_program_of_the_torch_module_does_not_grow_either() -> None:
    component = Component(wan_vae.VAE, tiny().config, make_placement("single"), dtype=torch.float32)

    def lines(function: Any, latents: int) -> int:
        lowered = component.program(function).lower(component.abstract_weights(), latents=random(1, 4, latents, 3, 5))
        return len(lowered.as_text().splitlines())

    assert lines(whole_videos.decode_scanned, 9) == lines(whole_videos.decode_scanned, 3)
    assert lines(whole_videos.decode_unrolled, 9) > 2 * lines(whole_videos.decode_unrolled, 3)


@pytest.mark.slow
def test_convolutions_of_accelerators() -> None:
    """Frames under a kernel are channels on a CPU only; elsewhere XLA's own convolution runs."""
    elsewhere = dataclasses.replace(make_placement("single"), platform="tpu", chip="v6e")
    component = vae_component(tiny().config, elsewhere, dtype=torch.float32)
    weights = component.load(Checkpoint.open(tiny().checkpoint))
    latents, video = random(1, 4, 3, 3, 5), random(1, 3, 9, 12, 20).clamp(-1, 1)
    pixels = component.program(decoding.decode)(weights, latents=latents.movedim(1, -1).contiguous())
    moments = component.program(decoding.encode)(weights, video=video.movedim(1, -1).contiguous())
    reference = tiny().reference
    assert relative_error(to_host(pixels).movedim(-1, 1), reference.decode(latents, return_dict=False)[0]) <= 1e-4
    assert relative_error(to_host(moments).movedim(-1, 1), reference.encode(video).latent_dist.parameters) <= 1e-4


@pytest.mark.slow
def test_published_vae_lowers_for_eight_chips() -> None:
    """81 frames of 720P, decoded in one program, on a machine that has no TPU."""
    placement = abstract_placement(MeshSizes(dp=2, sp=4), platform="tpu", chip="v6e")
    component = vae_component({}, placement, dtype=torch.bfloat16)
    program = component.program(decoding.decode, input_axes=decoding.DECODE_AXES)
    found = facts(
        program.export("tpu", component.abstract_weights(), latents=array(1, 21, 90, 160, 16)), sequence=14_400
    )
    assert found["platforms"] == ["tpu"]
    assert found["devices"] == 8
    assert found["outputs"] == [[1, 81, 720, 1280, 3]]
    assert found["kernels"] == 2, "splash over the pixels of a frame: of the first, and of the others"
    assert found["sequences in one array"] <= 1, "no scores of all pixels by all pixels"
    assert found["megabytes"] < 5


def changed(directory: Path, drop: str | None = None, add: str | None = None, **replaced: torch.Tensor) -> Checkpoint:
    tensors = {
        name: tensor for file in tiny().checkpoint.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    tensors = {name: tensor for name, tensor in tensors.items() if name != drop} | replaced
    save_file(tensors | ({add: torch.zeros(1)} if add else {}), directory / "model.safetensors")
    return Checkpoint.open(directory)


@pytest.mark.default_cases("missing", "of another shape")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drop": "decoder.conv_in.weight"}, "missing from the checkpoint: decoder.conv_in.weight"),
        ({"add": "decoder.extra.weight"}, "the model has no place for them: decoder.extra.weight"),
        (
            {"decoder.conv_in.weight": torch.zeros(8, 3, 3, 3, 3)},
            r"decoder.conv_in.weight: shape \(3, 3, 3, 3, 8\) in the file, expected \(3, 3, 3, 4, 8\)",
        ),
    ],
    ids=["missing", "unknown", "of another shape"],
)
def test_checkpoint_that_does_not_fit(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        component_of(tiny()).load(changed(tmp_path, **change))


@pytest.mark.thorough  # by default: checkpoints that do not fit
def test_weights_of_another_model() -> None:
    weights = component_of(four_levels()).load(Checkpoint.open(four_levels().checkpoint))
    with pytest.raises(
        InvalidValueError, match=r"vae_nnx.decode: weight decoder\S+ has shape .*, expected .*; use what `load`"
    ):
        component_of(tiny()).program(decoding.decode)(weights, latents=random(1, 1, 3, 5, 4))


@pytest.mark.parametrize("option", [{"is_residual": True}, {"patch_size": 2}], ids=str)
def test_vae_of_wan22_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(
        UnsupportedError, match=r"as in Wan 2.2 5B, is not written in Flax NNX; run this model through tor"
    ):
        vae_component({**tiny().config, **option}, make_placement("single"), dtype=torch.float32)


def test_without_flax(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("comfy_tpu.families.wan.nnx_vae.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flax", None)
    with pytest.raises(
        UnsupportedError, match=f"needs flax, which is not installed; run `{re.escape(install_command('nnx'))}`"
    ):
        vae_component(tiny().config, make_placement("single"), dtype=torch.float32)
