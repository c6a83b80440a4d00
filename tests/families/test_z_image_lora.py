"""LoRA for Z-Image: against diffusers' own loading and fusing, by diffusers', ComfyUI's and kohya's names."""

from pathlib import Path

import pytest
import torch

from comfy_tpu.config import Lora
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.z_image.lora import lora_names
from comfy_tpu.pipeline.lora import open_loras
from comfy_tpu.pipeline.lora_keys import make_targets
from comfy_tpu.pipeline.model_files import ModelFiles
from tests.families import small_z_image
from tests.families.small_flux_loras import Factors, comfy_style, fused_into, kohya_style, peft_style
from tests.pipeline import small_loras
from tests.pipeline.small_loras import Tensors, changed, error, loaded, random, write

RANK, HIDDEN, FFN = 4, 96, 256
BLOCKS = ("layers.0", "layers.2", "noise_refiner.1", "context_refiner.0")
BLOCK = {
    "attention.qkv": (3 * HIDDEN, HIDDEN),
    "attention.out": (HIDDEN, HIDDEN),
    "feed_forward.w1": (FFN, HIDDEN),
    "feed_forward.w2": (HIDDEN, FFN),
    "feed_forward.w3": (FFN, HIDDEN),
}
"""The names of Z-Image's own code."""


def factors() -> Factors:
    sizes = {f"{block}.{name}": size for block in BLOCKS for name, size in BLOCK.items()}
    return {
        name: (random(outputs, RANK, seed=2 * number), random(RANK, inputs, seed=2 * number + 1))
        for number, (name, (outputs, inputs)) in enumerate(sizes.items())
    }


def in_diffusers() -> Factors:
    """The same change by diffusers' names, taken apart by hand."""
    parted: Factors = {}
    for name, (up, down) in factors().items():
        if name.endswith("qkv"):
            for part, rows in zip("qkv", up.chunk(3), strict=True):
                parted[name.replace("qkv", f"to_{part}")] = (rows, down)
        else:
            parted[name.replace("attention.out", "attention.to_out.0")] = (up, down)
    return parted


STYLES = {
    "diffusers": lambda: peft_style(in_diffusers()),
    "ComfyUI": lambda: comfy_style(factors()),
    "ComfyUI with diffusers' names": lambda: comfy_style(in_diffusers()),
    "kohya": lambda: kohya_style(factors(), alpha=float(RANK)),
}


def base() -> Tensors:
    return small_z_image.reference("turbo").transformer.state_dict()


@pytest.mark.default_cases("ComfyUI-single")
@pytest.mark.parametrize(
    ("style", "mesh"),
    [*((style, "single") for style in STYLES), pytest.param("ComfyUI", "dp=2,tp=4", marks=pytest.mark.slow)],
)
def test_weights_are_those_that_diffusers_fuses(style: str, mesh: str, tmp_path: Path) -> None:
    own = write(tmp_path / "own.safetensors", STYLES["diffusers"]())
    expected = fused_into(small_z_image.reference("turbo"), own, 0.7)
    path = write(tmp_path / "a.safetensors", STYLES[style]())
    actual = loaded([Lora(path, 0.7)], mesh, directory=small_z_image.directory("turbo"))
    assert error(actual, base()) > 0.1, "the LoRA does something"
    assert error(actual, expected) < 1e-5
    touched = {name for name, tensor in base().items() if not torch.equal(tensor, expected[name])}
    assert set(changed(actual, base())) == touched == {f"{name}.weight" for name in in_diffusers()}


def test_every_module_is_known_by_its_original_name() -> None:
    files = ModelFiles.open(small_z_image.directory("turbo"))
    targets = make_targets(files.checkpoint(files.family.transformer).tensors, lora_names)
    for name in (*factors(), "layers.0.adaLN_modulation.0", "final_layer.linear", "x_embedder", "t_embedder.mlp.0"):
        for key in (f"diffusion_model.{name}", f"lora_unet_{name.replace('.', '_')}"):
            assert len(targets.find(key)) == (3 if name.endswith("qkv") else 1), key


def test_a_lora_of_wan_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "wan.safetensors", small_loras.kohya_style())
    with pytest.raises(InvalidValueError, match=r"fits nothing in model .*: use a LoRA made for Z-Image"):
        open_loras([Lora(path)], ModelFiles.open(small_z_image.directory("turbo")))
