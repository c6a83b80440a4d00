"""LoRA for LTX-Video: against diffusers' own loading and fusing, by diffusers', Lightricks' and kohya's names."""

from pathlib import Path

import pytest
import torch

from comfy_tpu.config import Lora
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.ltx_video import lora as ltx_lora
from comfy_tpu.pipeline.lora import open_loras
from comfy_tpu.pipeline.lora_keys import make_targets
from comfy_tpu.pipeline.model_files import ModelFiles
from tests.families import small_ltx
from tests.families.small_flux_loras import fused_into
from tests.families.small_ltx import HIDDEN, TEXT
from tests.pipeline import small_loras
from tests.pipeline.small_loras import Tensors, changed, error, loaded, random, write

RANK = 4
BLOCK = {
    **{f"attn{number}.to_{part}": (HIDDEN, HIDDEN) for number in (1, 2) for part in ("q", "k", "v", "out.0")},
    "ff.net.0.proj": (4 * HIDDEN, HIDDEN),
    "ff.net.2": (HIDDEN, 4 * HIDDEN),
}
# diffusers' name: (Lightricks', outputs, inputs)
OUTSIDE = {
    "proj_in": ("patchify_proj", HIDDEN, 6),
    "proj_out": ("proj_out", 6, HIDDEN),
    "time_embed.linear": ("adaln_single.linear", 6 * HIDDEN, HIDDEN),
    "time_embed.emb.timestep_embedder.linear_1": ("adaln_single.emb.timestep_embedder.linear_1", HIDDEN, 256),
    "caption_projection.linear_1": ("caption_projection.linear_1", HIDDEN, TEXT),
}
MODULES = {
    **{f"transformer_blocks.{layer}.{name}": size for layer in (0, 2) for name, size in BLOCK.items()},
    **{name: (outputs, inputs) for name, (_, outputs, inputs) in OUTSIDE.items()},
}


def lora(prefix: str, *, original: bool = False, kohya: bool = False) -> Tensors:
    """One LoRA under any names; kohya's parts and alphas make the same of it."""
    tensors = {}
    for number, (own, (outputs, inputs)) in enumerate(MODULES.items()):
        name = OUTSIDE[own][0] if original and own in OUTSIDE else own
        down, up = random(RANK, inputs, seed=2 * number), random(outputs, RANK, seed=2 * number + 1)
        if kohya:
            flat = f"{prefix}{name.replace('.', '_')}"
            tensors |= {f"{flat}.lora_down.weight": down, f"{flat}.lora_up.weight": up / 3}
            tensors[f"{flat}.alpha"] = torch.tensor(3.0 * RANK)
        else:
            tensors |= {f"{prefix}{name}.lora_A.weight": down, f"{prefix}{name}.lora_B.weight": up}
    return tensors


STYLES = {
    "diffusers": lambda: lora("transformer."),
    "ComfyUI": lambda: lora("diffusion_model.", original=True),
    "Lightricks": lambda: lora("", original=True),
    "kohya": lambda: lora("lora_unet_", original=True, kohya=True),
}


def base() -> Tensors:
    return small_ltx.reference().transformer.state_dict()


@pytest.mark.default_cases("ComfyUI-single")
@pytest.mark.parametrize(
    ("style", "mesh"),
    [
        *((style, "single") for style in STYLES),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("diffusers", "dp=2,tp=4"), ("ComfyUI", "dp=2,sp=4"))
        ),
    ],  # meshes by default: tests/pipeline/test_lora.py
)
def test_weights_are_those_that_diffusers_fuses(style: str, mesh: str, tmp_path: Path) -> None:
    expected = fused_into(small_ltx.reference(), write(tmp_path / "own.safetensors", STYLES["diffusers"]()), 0.7)
    path = write(tmp_path / "a.safetensors", STYLES[style]())
    actual = loaded([Lora(path, 0.7)], mesh, directory=small_ltx.directory())
    assert error(actual, base()) > 0.1, "the LoRA does something"
    assert error(actual, expected) < 1e-5
    touched = {name for name, tensor in base().items() if not torch.equal(tensor, expected[name])}
    assert set(changed(actual, base())) == touched == {f"{name}.weight" for name in MODULES}


def test_every_module_has_one_name_of_its_own() -> None:
    """Two modules of one name would both get what is meant for one of them."""
    files = ModelFiles.open(small_ltx.directory())
    tensors = files.checkpoint(files.family.transformer).tensors
    targets = make_targets(tensors, ltx_lora.lora_names)
    for name, info in tensors.items():
        if not name.endswith(".weight"):
            continue
        (alias,) = ltx_lora.lora_names(name.removesuffix(".weight"), info.shape)
        for key in (f"diffusion_model.{alias}", f"lora_unet_{alias.replace('.', '_')}"):
            assert [target.weight for target in targets.find(key)] == [name]


def test_a_lora_of_wan_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "wan.safetensors", small_loras.kohya_style())
    with pytest.raises(InvalidValueError, match=r"fits nothing in model .*: use a LoRA made for LTX-Video"):
        open_loras([Lora(path)], ModelFiles.open(small_ltx.directory()))
