"""LoRA for LTX-2: against diffusers' own loading and fusing, by diffusers' and by Lightricks' names."""

from pathlib import Path

import pytest
import torch

from comfy_tpu.config import Lora
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.ltx2 import lora as ltx2_lora
from comfy_tpu.pipeline.lora import open_loras
from comfy_tpu.pipeline.lora_keys import make_targets
from comfy_tpu.pipeline.model_files import ModelFiles
from tests.families import small_ltx2
from tests.families.small_flux_loras import fused_into
from tests.families.small_ltx2 import AUDIO_HIDDEN, CHANNELS, HIDDEN
from tests.pipeline import small_loras
from tests.pipeline.small_loras import Tensors, changed, error, loaded, random, write

RANK = 4
BLOCK = {
    "attn1.to_q": (HIDDEN, HIDDEN),
    "audio_attn1.to_out.0": (AUDIO_HIDDEN, AUDIO_HIDDEN),
    "audio_attn2.to_k": (AUDIO_HIDDEN, AUDIO_HIDDEN),
    "audio_to_video_attn.to_k": (AUDIO_HIDDEN, AUDIO_HIDDEN),
    "video_to_audio_attn.to_v": (AUDIO_HIDDEN, HIDDEN),
    "ff.net.0.proj": (4 * HIDDEN, HIDDEN),
    "audio_ff.net.2": (AUDIO_HIDDEN, 4 * AUDIO_HIDDEN),
}
# diffusers' name: (Lightricks', outputs, inputs)
OUTSIDE = {
    "proj_in": ("patchify_proj", HIDDEN, CHANNELS),
    "audio_proj_in": ("audio_patchify_proj", AUDIO_HIDDEN, CHANNELS),
    "audio_time_embed.linear": ("audio_adaln_single.linear", 6 * AUDIO_HIDDEN, AUDIO_HIDDEN),
    "av_cross_attn_video_a2v_gate.linear": ("av_ca_a2v_gate_adaln_single.linear", HIDDEN, HIDDEN),
}
MODULES = {
    **{f"transformer_blocks.{layer}.{name}": size for layer in (0, 2) for name, size in BLOCK.items()},
    **{name: (outputs, inputs) for name, (_, outputs, inputs) in OUTSIDE.items()},
}


def lora(prefix: str, *, original: bool = False) -> Tensors:
    tensors = {}
    for number, (own, (outputs, inputs)) in enumerate(MODULES.items()):
        name = OUTSIDE[own][0] if original and own in OUTSIDE else own
        tensors[f"{prefix}{name}.lora_A.weight"] = random(RANK, inputs, seed=2 * number)
        tensors[f"{prefix}{name}.lora_B.weight"] = random(outputs, RANK, seed=2 * number + 1)
    return tensors


STYLES = {
    "diffusers": lambda: lora("transformer."),
    "ComfyUI": lambda: lora("diffusion_model.", original=True),
}


def base() -> Tensors:
    return small_ltx2.reference().transformer.state_dict()


@pytest.mark.parametrize(
    ("style", "mesh"), [("ComfyUI", "dp=2,sp=4"), pytest.param("diffusers", "single", marks=pytest.mark.slow)]
)
def test_weights_are_those_that_diffusers_fuses(style: str, mesh: str, tmp_path: Path) -> None:
    own = write(tmp_path / "own.safetensors", STYLES["diffusers"]())
    expected = fused_into(small_ltx2.reference(), own, 0.7)
    path = write(tmp_path / "a.safetensors", STYLES[style]())
    actual = loaded([Lora(path, 0.7)], mesh, directory=small_ltx2.directory())
    assert error(actual, base()) > 0.05, "the LoRA does something"
    assert error(actual, expected) < 1e-5
    touched = {name for name, tensor in base().items() if not torch.equal(tensor, expected[name])}
    assert set(changed(actual, base())) == touched == {f"{name}.weight" for name in MODULES}


def test_every_module_has_one_name_of_its_own() -> None:
    """Two modules of one name would both get what is meant for one of them."""
    files = ModelFiles.open(small_ltx2.directory())
    tensors = files.checkpoint(files.family.transformer).tensors
    targets = make_targets(tensors, ltx2_lora.lora_names)
    for name, info in tensors.items():
        if not name.endswith(".weight"):
            continue
        (alias,) = ltx2_lora.lora_names(name.removesuffix(".weight"), info.shape)
        assert [target.weight for target in targets.find(f"diffusion_model.{alias}")] == [name]


def test_a_lora_of_another_family_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "wan.safetensors", small_loras.kohya_style())
    with pytest.raises(InvalidValueError, match=r"fits nothing in model .*: use a LoRA made for LTX-2"):
        open_loras([Lora(path)], ModelFiles.open(small_ltx2.directory()))
