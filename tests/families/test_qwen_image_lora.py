"""LoRA for Qwen-Image: against diffusers' own loading and fusing, by the names that trainers and ComfyUI use."""

import functools
from pathlib import Path

import pytest
import torch

from comfy_tpu.config import Lora
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.pipeline.lora import open_loras
from comfy_tpu.pipeline.model_files import ModelFiles
from tests.closeness import SAME, psnr
from tests.families import small_qwen_image
from tests.families.small_flux_loras import comfy_style, fused_into, kohya_style, peft_style
from tests.families.test_qwen_image import CHOSEN, PROMPT, opened, picture
from tests.pipeline import small_loras
from tests.pipeline.small_loras import Tensors, changed, error, loaded, random, write

RANK = 4


@functools.cache
def modules() -> dict[str, torch.Size]:
    """The shapes of all matrices but those of the second block."""
    return {
        name: part.weight.shape
        for name, part in small_qwen_image.reference("image").transformer.named_modules()
        if isinstance(part, torch.nn.Linear) and "_blocks.1." not in name
    }


def factors(size: float = 1.0) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    return {
        name: (size * random(shape[0], RANK, seed=2 * number), random(RANK, shape[1], seed=2 * number + 1))
        for number, (name, shape) in enumerate(modules().items())
    }


STYLES = {
    "diffusers": peft_style,
    "ComfyUI": comfy_style,
    "kohya": lambda made: kohya_style(made, alpha=float(RANK)),
    "ModelScope": lambda made: {
        key.removeprefix("transformer.").replace(".weight", ".default.weight"): tensor
        for key, tensor in peft_style(made).items()
    },
    "Lightning": lambda made: {
        key.removeprefix("diffusion_model."): tensor for key, tensor in comfy_style(made, alpha=float(RANK)).items()
    },
}


def base() -> Tensors:
    return small_qwen_image.reference("image").transformer.state_dict()


@pytest.mark.default_cases("ComfyUI-single", "Lightning-single")
@pytest.mark.parametrize(
    ("style", "mesh"),
    [*((style, "single") for style in STYLES), pytest.param("diffusers", "dp=2,tp=4", marks=pytest.mark.slow)],
)
def test_weights_are_those_that_diffusers_fuses(style: str, mesh: str, tmp_path: Path) -> None:
    own = write(tmp_path / "own.safetensors", peft_style(factors()))
    expected = fused_into(small_qwen_image.reference("image"), own, 0.7)
    path = write(tmp_path / "a.safetensors", STYLES[style](factors()))
    actual = loaded([Lora(path, 0.7)], mesh, directory=small_qwen_image.directory("image"))
    assert error(actual, base()) > 0.1, "the LoRA does something"
    assert error(actual, expected) < 1e-5
    touched = {name for name, tensor in base().items() if not torch.equal(tensor, expected[name])}
    assert set(changed(actual, base())) == touched == {f"{name}.weight" for name in modules()}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["single", "dp=2,tp=4"])
def test_the_picture_is_that_of_diffusers_with_the_lora(mesh: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", peft_style(factors(0.1)))
    pipeline, reference = opened("image", mesh), small_qwen_image.reference("image")
    before, kept = picture(pipeline), {name: tensor.clone() for name, tensor in base().items()}
    fused = fused_into(reference, path, 1.0)
    try:
        reference.transformer.load_state_dict(fused)
        chosen = {name: value for name, value in CHOSEN.items() if name not in ("seed", "guidance_scale")}
        generator = torch.Generator().manual_seed(CHOSEN["seed"])
        made = reference(
            PROMPT, true_cfg_scale=CHOSEN["guidance_scale"], **chosen, generator=generator, output_type="pt"
        )
        wanted = made.images.permute(0, 2, 3, 1)
        pipeline.use_loras([Lora(path)])
        actual = picture(pipeline)
    finally:
        reference.transformer.load_state_dict(kept)
        pipeline.use_loras([])
    assert psnr(actual, wanted) >= SAME
    assert psnr(actual, before) < 60
    assert torch.equal(picture(pipeline), before)


def test_a_lora_of_wan_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "wan.safetensors", small_loras.kohya_style())
    with pytest.raises(InvalidValueError, match=r"fits nothing in model .*: use a LoRA made for Qwen-Image"):
        open_loras([Lora(path)], ModelFiles.open(small_qwen_image.directory("image")))
