"""LoRA's relatives against PEFT's own merging of them: LoHa, LoKr and DoRA; other changes against their formulas."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch

from comfy_tpu.config import Lora
from tests.families import small_flux, small_flux_loras
from tests.pipeline import small_loras, small_pipeline
from tests.pipeline.small_loras import Tensors, changed, error, loaded, random, write

TARGETS = {"target_modules": ["to_q", "ffn.net.0.proj"]}
CONFIGS: dict[str, Callable[[], Any]] = {
    "LoHa": lambda: peft.LoHaConfig(r=4, alpha=6, init_weights=False, **TARGETS),
    "LoKr": lambda: peft.LoKrConfig(r=2, alpha=3, init_weights=False, decompose_factor=8, **TARGETS),
    "LoKr of four": lambda: peft.LoKrConfig(
        r=2, alpha=3, init_weights=False, decompose_both=True, decompose_factor=16, **TARGETS
    ),
    "DoRA": lambda: peft.LoraConfig(r=4, lora_alpha=6, use_dora=True, init_lora_weights=False, **TARGETS),
}


def base() -> Tensors:
    return small_pipeline.reference().transformer.state_dict()


def adapted(kind: str) -> tuple[Tensors, Tensors]:
    """A random adapter as a file has it, and the weights into which PEFT has merged it."""
    config = CONFIGS[kind]()
    torch.manual_seed(7)
    model = peft.get_peft_model(copy.deepcopy(small_pipeline.reference().transformer), config)
    for name, parameter in model.named_parameters():
        if "magnitude" in name:
            parameter.data *= 1 + 0.3 * torch.rand_like(parameter)
        elif parameter.requires_grad:
            parameter.data = torch.randn_like(parameter) * 0.3
    tensors = peft.get_peft_model_state_dict(model)
    modules = {
        name.rpartition(".hada_")[0] or name.rpartition(".lokr_")[0] or name.partition(".lora_")[0] for name in tensors
    }
    alpha = torch.tensor(float(config.lora_alpha if kind == "DoRA" else config.alpha))
    tensors |= {f"{module}.alpha": alpha for module in modules}
    return tensors, model.merge_and_unload().state_dict()


@pytest.mark.parametrize("kind", CONFIGS)
def test_weights_are_those_that_peft_merges(kind: str, tmp_path: Path) -> None:
    tensors, merged = adapted(kind)
    part = {"LoHa": "hada_w2_b", "LoKr": "lokr_w2_b", "LoKr of four": "lokr_w1_a", "DoRA": "lora_magnitude_vector"}
    assert any(name.endswith(part[kind]) for name in tensors)
    path = write(tmp_path / "a.safetensors", tensors)
    expected = {name: tensor + 0.7 * (merged[name] - tensor) for name, tensor in base().items()}
    actual = loaded([Lora(path, 0.7)], "dp=2,tp=4")
    assert error(actual, base()) > 0.05, "the adapter does something"
    assert error(actual, expected) < 1e-5


def test_a_dora_and_a_lora_are_both_merged_into_bfloat16(tmp_path: Path) -> None:
    tensors, merged = adapted("DoRA")
    dora = write(tmp_path / "a.safetensors", tensors)
    lora = write(tmp_path / "b.safetensors", small_loras.kohya_style())
    fused = small_loras.fused((lora, 0.5))
    expected = {name: tensor + (merged[name] - tensor) + (fused[name] - tensor) for name, tensor in base().items()}
    assert error(loaded([Lora(dora), Lora(lora, 0.5)], dtype=torch.bfloat16), expected) < 2**-8


def test_magnitudes_may_be_those_of_inputs(tmp_path: Path) -> None:
    """As OneTrainer writes them."""
    name = "transformer_blocks_0_attn_to_q"
    up, down = random(128, 4, seed=1), random(4, 128, seed=2)
    magnitude = 1 + random(1, 128, seed=3)
    tensors = {
        f"lora_transformer_{name}.lora_up.weight": up,
        f"lora_transformer_{name}.lora_down.weight": down,
        f"lora_transformer_{name}.alpha": torch.tensor(2.0),
        f"lora_transformer_{name}.dora_scale": magnitude,
    }
    weights = small_flux.reference("dev").transformer.state_dict()
    weight = weights["transformer_blocks.0.attn.to_q.weight"].numpy()
    total = weight + 0.5 * up.numpy() @ down.numpy()
    expected = total / np.sqrt((total**2).sum(0)) * magnitude.numpy()
    actual = loaded([Lora(write(tmp_path / "a.safetensors", tensors))], directory=small_flux.directory("dev"))
    np.testing.assert_allclose(actual["transformer_blocks.0.attn.to_q.weight"], expected, rtol=1e-4, atol=1e-6)
    assert changed(actual, weights) == ["transformer_blocks.0.attn.to_q.weight"]


@pytest.mark.parametrize(
    "prefix", ["diffusion_model.double_blocks.1.img_attn.qkv", "lycoris_double_blocks_1_img_attn_qkv"]
)
def test_a_lokr_of_a_fused_module_is_divided(prefix: str, tmp_path: Path) -> None:
    """Without a rank, alpha has no meaning, and is not read."""
    first, second = random(6, 4, seed=1), random(64, 32, seed=2)
    tensors = {f"{prefix}.lokr_w1": first, f"{prefix}.lokr_w2": second, f"{prefix}.alpha": torch.tensor(1e10)}
    weights = small_flux.reference("dev").transformer.state_dict()
    actual = loaded([Lora(write(tmp_path / "a.safetensors", tensors), 0.5)], directory=small_flux.directory("dev"))
    pieces = np.split(0.5 * np.kron(first.numpy(), second.numpy()), 3)
    for letter, piece in zip("qkv", pieces, strict=True):
        name = f"transformer_blocks.1.attn.to_{letter}.weight"
        np.testing.assert_allclose(actual[name], weights[name].numpy() + piece, rtol=1e-5, atol=1e-6)


def test_the_names_of_xlabs_are_read_as_diffusers_reads_them(tmp_path: Path) -> None:
    tensors, hidden = {}, small_flux_loras.HIDDEN
    for number in range(small_flux_loras.DOUBLE):
        for stream in (1, 2):
            for part, outputs in (("qkv", 3 * hidden), ("proj", hidden)):
                name, seed = f"double_blocks.{number}.processor.{part}_lora{stream}", 100 * number + 10 * stream
                tensors[f"{name}.down.weight"] = random(4, hidden, seed=seed + len(part))
                tensors[f"{name}.up.weight"] = random(outputs, 4, seed=seed + len(part) + 5)
    path = write(tmp_path / "a.safetensors", tensors)
    expected = small_flux_loras.fused(path, 0.7)
    actual = loaded([Lora(path, 0.7)], directory=small_flux.directory("dev"))
    assert error(actual, expected) < 1e-5
    assert error(actual, small_flux.reference("dev").transformer.state_dict()) > 0.1, "the LoRA does something"


def test_a_difference_of_modulations_is_merged(tmp_path: Path) -> None:
    change, last = random(1, 6, 96, seed=1), random(1, 2, 96, seed=2)
    tensors = {"diffusion_model.blocks.1.diff_m": change, "diffusion_model.head.diff_m": last}
    actual = loaded([Lora(write(tmp_path / "a.safetensors", tensors), 0.5)])
    for name, difference in (("blocks.1.scale_shift_table", change), ("scale_shift_table", last)):
        np.testing.assert_allclose(actual[name], (base()[name] + 0.5 * difference).numpy(), rtol=1e-6)


def with_kernel(first: torch.Tensor, middle: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """first @ middle @ last at each place of the kernel."""
    flat = torch.stack([first @ middle.flatten(2)[..., place] @ last for place in range(middle[0, 0].numel())], -1)
    return flat.reshape(len(first), last.shape[1], *middle.shape[2:])


def middle_lora() -> tuple[Tensors, torch.Tensor]:
    up, middle, down = random(96, 3, seed=1), random(3, 2, 1, 2, 2, seed=2), random(2, 4, seed=3)
    tensors = {"lora_up.weight": up[..., None, None, None], "lora_mid.weight": middle}
    return tensors | {"lora_down.weight": down[..., None, None, None]}, 3 / 2 * with_kernel(up, middle, down)


def middle_loha() -> tuple[Tensors, torch.Tensor]:
    tensors: Tensors = {}
    difference = torch.tensor(3 / 2)
    for number in (1, 2):
        first, middle, last = random(2, 96, seed=number), random(2, 2, 1, 2, 2, seed=5 + number), random(2, 4, seed=9)
        tensors |= {f"hada_w{number}_a": first, f"hada_t{number}": middle, f"hada_w{number}_b": last}
        difference = difference * with_kernel(first.T, middle, last)
    return tensors, difference


def middle_lokr() -> tuple[Tensors, torch.Tensor]:
    whole, first, middle, last = (
        random(*shape, seed=number) for number, shape in enumerate([(8, 2), (3, 12), (3, 3, 1, 2, 2), (3, 2)])
    )
    second = with_kernel(first.T, middle, last)
    places = [torch.kron(whole, second.flatten(2)[..., place]) for place in range(4)]
    tensors = {"lokr_w1": whole, "lokr_w2_a": first, "lokr_t2": middle, "lokr_w2_b": last}
    return tensors, torch.stack(places, -1).reshape(96, 4, 1, 2, 2)  # alpha / rank = 3 / 3


@pytest.mark.parametrize("make", [middle_lora, middle_loha, middle_lokr])
def test_middle_matrices_are_one_more_product(make: Callable[[], tuple[Tensors, torch.Tensor]], tmp_path: Path) -> None:
    parts, difference = make()
    tensors = {f"diffusion_model.patch_embedding.{part}": tensor for part, tensor in parts.items()}
    tensors["diffusion_model.patch_embedding.alpha"] = torch.tensor(3.0)
    actual = loaded([Lora(write(tmp_path / "a.safetensors", tensors), 0.5)])
    expected = base()["patch_embedding.weight"] + 0.5 * difference
    np.testing.assert_allclose(actual["patch_embedding.weight"], expected.numpy(), rtol=1e-5, atol=1e-6)
    assert changed(actual, base()) == ["patch_embedding.weight"]


def test_norms_are_merged_as_differences(tmp_path: Path) -> None:
    weight, bias = random(96, seed=1), random(96, seed=2)
    tensors = {"lora_unet_blocks_1_norm3.w_norm": weight, "lora_unet_blocks_1_norm3.b_norm": bias}
    actual = loaded([Lora(write(tmp_path / "a.safetensors", tensors), 0.5)])
    for name, difference in (("blocks.1.norm2.weight", weight), ("blocks.1.norm2.bias", bias)):
        np.testing.assert_allclose(actual[name], (base()[name] + 0.5 * difference).numpy(), rtol=1e-6)
    assert changed(actual, base()) == ["blocks.1.norm2.weight", "blocks.1.norm2.bias"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_set_weight_replaces_a_weight_at_any_strength(dtype: torch.dtype, tmp_path: Path) -> None:
    """As in ComfyUI. The changes of other files are added to it; of two replacements the last one stays."""
    name, norm = "blocks.1.attn1.to_q.weight", "blocks.1.attn1.norm_q.weight"
    first, last, scale = random(96, 96, seed=1), random(96, 96, seed=2), random(96, seed=3)
    keys = [f"diffusion_model.blocks.1.self_attn.{part}.set_weight" for part in ("q", "norm_q")]
    files = [{keys[0]: first}, {keys[0]: last, keys[1]: scale}, small_loras.comfy_style(alpha=None)]
    paths = [write(tmp_path / f"{number}.safetensors", tensors) for number, tensors in enumerate(files)]
    actual = loaded([Lora(path, 0.5) for path in paths], dtype=dtype)
    up, down = small_loras.factors(4, 1)["blocks.1.attn1.to_q"]
    tolerance = 1e-5 if dtype == torch.float32 else 2**-8
    np.testing.assert_allclose(actual[name], (last + 0.5 * up @ down).numpy(), rtol=tolerance, atol=1e-6)
    np.testing.assert_allclose(actual[norm], scale.numpy(), rtol=tolerance)


def test_set_weight_of_a_fused_module_is_divided(tmp_path: Path) -> None:
    whole = random(384, 128, seed=1)
    tensors = {"diffusion_model.double_blocks.1.img_attn.qkv.set_weight": whole}
    actual = loaded([Lora(write(tmp_path / "a.safetensors", tensors))], directory=small_flux.directory("dev"))
    for letter, piece in zip("qkv", whole.chunk(3), strict=True):
        np.testing.assert_array_equal(actual[f"transformer_blocks.1.attn.to_{letter}.weight"], piece.numpy())
