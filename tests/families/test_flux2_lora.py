"""LoRA for Flux.2: against diffusers' own loading and fusing, by every name that files have for a module."""

from pathlib import Path
from typing import Any

import pytest
import torch

from comfy_tpu.compiler.packed_weights import pack_weight
from comfy_tpu.config import Lora, RuntimeConfig
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.flux2 import transformer as flux2_transformer
from comfy_tpu.families.flux2.lora import lora_names
from comfy_tpu.pipeline.lora import open_loras
from comfy_tpu.pipeline.lora_keys import make_targets
from comfy_tpu.pipeline.model_files import ModelFiles
from comfy_tpu.pipeline.video import VideoPipeline
from tests.covering import covering
from tests.families import small_flux2, small_flux_loras
from tests.families.meshes import MESHES
from tests.families.small_flux2_loras import HIDDEN, LAST_NORM, MODULATIONS, diffusers_style, factors
from tests.families.small_flux_loras import comfy_style, fused_into, kohya_style, original_style, peft_style
from tests.pipeline.small_loras import Tensors, changed, error, loaded, write


def base(variant: str = "dev") -> Tensors:
    return small_flux2.reference(variant).transformer.state_dict()


def fused(path: Path, strength: float, variant: str = "dev") -> Tensors:
    return fused_into(small_flux2.reference(variant), path, strength)


def weights(loras: list[Lora], mesh: str = "single", variant: str = "dev", **options: Any) -> dict[str, Any]:
    return loaded(loras, mesh, directory=small_flux2.directory(variant), **options)


def without(*names: str) -> small_flux_loras.Factors:
    return {name: pair for name, pair in factors().items() if name not in names}


# What diffusers (0.42) loads: of a kohya file no modulations, and under the original names the last norm as it is,
# though a model of these names has its halves swapped on the way.
STYLES = {
    "diffusers": lambda: diffusers_style(factors()),
    "kohya": lambda: kohya_style(without(LAST_NORM, *MODULATIONS), alpha=2.0),
    "kohya without alpha": lambda: kohya_style(without(LAST_NORM, *MODULATIONS)),
    "original": lambda: original_style(without(LAST_NORM)),
    "comfy": lambda: {
        key.replace("base_model.model.", "diffusion_model."): tensor
        for key, tensor in original_style(without(LAST_NORM)).items()
    },
}


# comfy by default: whole, in test_every_style_of_one_lora_is_that_of_diffusers_on_every_mesh.
@pytest.mark.default_cases("kohya")
@pytest.mark.parametrize(
    "style", [pytest.param(style, marks=[pytest.mark.slow] if style == "comfy" else []) for style in STYLES]
)
def test_weights_are_those_that_diffusers_fuses(style: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", STYLES[style]())
    expected = fused(path, 0.7)
    actual = weights([Lora(path, 0.7)])
    assert error(actual, base()) > 0.1, "the LoRA does something"
    assert error(actual, expected) < 1e-5
    assert set(changed(actual, base())) == {name for name in base() if not torch.equal(base()[name], expected[name])}


WHOLE = {"kohya": lambda made: kohya_style(made, alpha=4.0), "comfy": comfy_style, "original": original_style}


@pytest.mark.default_cases("comfy-dp=2,tp=4")
@covering("style, mesh", WHOLE, MESHES, strength=1)
def test_every_style_of_one_lora_is_that_of_diffusers_on_every_mesh(style: str, mesh: str, tmp_path: Path) -> None:
    """With everything that there is: diffusers gets its own names, taken apart by hand."""
    made = factors(seed=2)
    expected = fused(write(tmp_path / "a.safetensors", diffusers_style(made)), -0.5)
    actual = weights([Lora(write(tmp_path / "b.safetensors", WHOLE[style](made)), -0.5)], mesh)
    tp = 4 if "tp=4" in mesh else 1
    packed = (
        flux2_transformer.TRANSFORMER.packed(small_flux2.TRANSFORMER) if flux2_transformer.TRANSFORMER.packed else ()
    )
    assert error(actual, {name: pack_weight(name, tensor, packed, tp) for name, tensor in expected.items()}) < 1e-5
    name = "single_transformer_blocks.1.attn.to_qkv_mlp_proj.weight"
    assert (error(actual, {name: expected[name]}) < 1e-5) == (tp == 1), "its rows are in another order at tp=4"


@pytest.mark.thorough  # by default: schnell, test_flux_lora.py
def test_klein_has_no_place_for_guidance_and_takes_the_rest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a.safetensors", comfy_style(without("guidance_in.out_layer")))
    actual = weights([Lora(path)], variant="klein")
    taken = without("guidance_in.in_layer", "guidance_in.out_layer")
    expected = fused(write(tmp_path / "b.safetensors", diffusers_style(taken)), 1.0, "klein")
    assert error(actual, expected) < 1e-5
    assert "has no place for diffusion_model.guidance_in.in_layer.lora_down.weight" in caplog.text


def test_every_module_is_known_by_its_original_name() -> None:
    """The names of Flux.2's own code, written out for one block of each kind."""
    files = ModelFiles.open(small_flux2.directory("dev"))
    targets = make_targets(files.checkpoint(files.family.transformer).tensors, lora_names)
    norms = ("query_norm.scale", "key_norm.scale")
    names = [name for name in factors() if not any(f"blocks.{number}." in name for number in (1, 2))]
    names += [f"double_blocks.0.{stream}_attn.norm.{norm}" for stream in ("img", "txt") for norm in norms]
    names += [f"single_blocks.0.norm.{norm}" for norm in norms]
    found = {target.weight for name in names for target in targets.find(f"diffusion_model.{name}")}
    assert found == {name for name in targets.shapes if not any(f"blocks.{number}." in name for number in (1, 2))}
    assert all(targets.find(f"lora_unet_{name.replace('.', '_')}") for name in names)


@pytest.mark.slow  # by default: the weights above, a video in tests/pipeline/test_presets.py
@pytest.mark.parametrize("mesh", [pytest.param("single", marks=pytest.mark.slow), "dp=2,tp=4"])
def test_the_picture_is_that_of_diffusers_with_the_lora(mesh: str, tmp_path: Path) -> None:
    small = {name: (0.1 * up, down) for name, (up, down) in factors().items()}
    path = write(tmp_path / "a.safetensors", diffusers_style(small))
    pipeline = VideoPipeline.open(small_flux2.directory("klein"), RuntimeConfig(mesh=mesh))
    settings = pipeline.settings(height=48, width=80, num_inference_steps=2, max_sequence_length=40, seed=7)

    def picture() -> torch.Tensor:
        return torch.cat(list(pipeline.generate("a red circle", settings)), dim=1)[0, 0]

    before = picture()
    pipeline.use_loras([Lora(write(tmp_path / "b.safetensors", comfy_style(small)))])
    reference = small_flux2.reference("klein")
    own = reference.transformer.state_dict()
    kept = {name: tensor.clone() for name, tensor in own.items()}
    try:
        reference.transformer.load_state_dict(fused(path, 1.0, "klein"))
        (expected,) = reference(
            prompt="a red circle",
            height=48,
            width=80,
            num_inference_steps=2,
            max_sequence_length=40,
            generator=torch.Generator().manual_seed(7),
            output_type="pt",
        ).images
    finally:
        reference.transformer.load_state_dict(kept)
    after = picture()
    assert (after - before).abs().max() > 0.01, "the LoRA does something"
    assert (after - expected.permute(1, 2, 0)).abs().max() < 1e-3
    pipeline.use_loras([])
    assert torch.equal(picture(), before)


def test_a_lora_of_the_first_generation_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", comfy_style(small_flux_loras.factors(top=False)))
    with pytest.raises(InvalidValueError, match=r"use a LoRA made for this size of Flux\.2 dev"):
        open_loras([Lora(path)], ModelFiles.open(small_flux2.directory("dev")))


def test_attention_of_the_first_generation_is_refused_too(tmp_path: Path) -> None:
    """Flux.1 is as wide as Flux.2 klein 4B: what their blocks have in common fits, and is the smaller part."""
    double = [f"transformer_blocks.{number}.attn.{part}" for number in range(19) for part in ("to_q", "to_out.0")]
    single = [f"single_transformer_blocks.{number}.attn.to_q" for number in range(38)]
    square = torch.zeros(HIDDEN, 4), torch.zeros(4, HIDDEN)
    path = write(tmp_path / "a.safetensors", peft_style(dict.fromkeys((*double, *single), square)))
    with pytest.raises(
        InvalidValueError,
        match=r"was made for another model: .* has a place for 4 of its 76 modules, and not for transformer\.single_.* "
        r"and 141 more; use a LoRA made for Flux\.2 klein",
    ):
        open_loras([Lora(path)], ModelFiles.open(small_flux2.directory("klein")))
