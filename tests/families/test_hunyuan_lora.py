"""LoRA for HunyuanVideo-1.5: against diffusers' own fusing, by diffusers', the authors' and ComfyUI's names."""

import copy
import warnings
from pathlib import Path

import pytest
import torch

from comfy_tpu.config import Lora
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.hunyuan_video import lora as hunyuan_lora
from comfy_tpu.families.hunyuan_video.model import HUNYUAN15_IMAGE
from comfy_tpu.pipeline.lora import open_loras
from comfy_tpu.pipeline.lora_keys import make_targets
from comfy_tpu.pipeline.model_files import ModelFiles
from tests.covering import covering
from tests.families import small_flux_loras, small_hunyuan
from tests.families.meshes import MESHES
from tests.pipeline import small_loras
from tests.pipeline.small_loras import Tensors, changed, error, loaded, random, write

HIDDEN, FFN, REFINED, RANK = 96, 192, 384, 4
REFINER = "txt_in.individual_token_refiner.blocks.0"

# diffusers' name: (the authors', ComfyUI's, outputs, inputs), for one block of each kind and outside of them.
MODULES = {
    "transformer_blocks.1.attn.to_out.0": ("img_attn_proj", "img_attn.proj", HIDDEN, HIDDEN),
    "transformer_blocks.1.attn.to_add_out": ("txt_attn_proj", "txt_attn.proj", HIDDEN, HIDDEN),
    "transformer_blocks.1.ff.net.0.proj": ("img_mlp.fc1", "img_mlp.0", FFN, HIDDEN),
    "transformer_blocks.1.ff.net.2": ("img_mlp.fc2", "img_mlp.2", HIDDEN, FFN),
    "transformer_blocks.1.ff_context.net.0.proj": ("txt_mlp.fc1", "txt_mlp.0", FFN, HIDDEN),
    "transformer_blocks.1.ff_context.net.2": ("txt_mlp.fc2", "txt_mlp.2", HIDDEN, FFN),
    "transformer_blocks.1.norm1.linear": ("img_mod.linear", "img_mod.lin", 6 * HIDDEN, HIDDEN),
    "transformer_blocks.1.norm1_context.linear": ("txt_mod.linear", "txt_mod.lin", 6 * HIDDEN, HIDDEN),
}
OUTSIDE = {
    "context_embedder.token_refiner.refiner_blocks.0.attn.to_out.0": (
        f"{REFINER}.self_attn_proj",
        f"{REFINER}.self_attn.proj",
        HIDDEN,
        HIDDEN,
    ),
    "context_embedder.token_refiner.refiner_blocks.0.ff.net.0.proj": (
        f"{REFINER}.mlp.fc1",
        f"{REFINER}.mlp.0",
        REFINED,
        HIDDEN,
    ),
    "context_embedder.token_refiner.refiner_blocks.0.norm_out.linear": (
        f"{REFINER}.adaLN_modulation.1",
        f"{REFINER}.adaLN_modulation.1",
        2 * HIDDEN,
        HIDDEN,
    ),
    "context_embedder.time_text_embed.timestep_embedder.linear_1": (
        "txt_in.t_embedder.mlp.0",
        "txt_in.t_embedder.in_layer",
        HIDDEN,
        256,
    ),
    "context_embedder.time_text_embed.text_embedder.linear_2": (
        "txt_in.c_embedder.linear_2",
        "txt_in.c_embedder.out_layer",
        HIDDEN,
        HIDDEN,
    ),
    "context_embedder.proj_in": ("txt_in.input_embedder", "txt_in.input_embedder", HIDDEN, 48),
    "context_embedder_2.linear_3": ("byt5_in.fc3", "byt5_in.fc3", HIDDEN, 2048),
    "image_embedder.linear_2": ("vision_in.proj.3", "vision_in.proj.3", HIDDEN, 16),
    "time_embed.timestep_embedder.linear_2": ("time_in.mlp.2", "time_in.out_layer", HIDDEN, HIDDEN),
    "proj_out": ("final_layer.linear", "final_layer.linear", 4, HIDDEN),
}
FUSED = {
    ("img_attn_qkv", "img_attn.qkv"): ("to_q", "to_k", "to_v"),
    ("txt_attn_qkv", "txt_attn.qkv"): ("add_q_proj", "add_k_proj", "add_v_proj"),
}
LAST = "final_layer.adaLN_modulation.1"


def pair(name: str, outputs: int, inputs: int, number: int) -> Tensors:
    seed = 100 + 2 * number
    return {
        f"{name}.lora_A.weight": random(RANK, inputs, seed=seed),
        f"{name}.lora_B.weight": random(outputs, RANK, seed=seed + 1),
    }


def split_streams(tensors: Tensors, theirs: str, rows: list[torch.Tensor], names: list[str]) -> Tensors:
    """The outputs under names of their own, each with the inputs of all."""
    down = tensors[f"{theirs}.lora_A.weight"]
    return {
        key: tensor
        for name, up in zip(names, rows, strict=True)
        for key, tensor in ((f"{name}.lora_A.weight", down), (f"{name}.lora_B.weight", up))
    }


def styles() -> dict[str, Tensors]:
    """One LoRA by all names; "diffusers" and "authors" are taken apart here by hand."""
    made: dict[str, Tensors] = {"diffusers": {}, "authors": {}, "ComfyUI": {}, "HunyuanVideo": {}}
    for number, (own, (authors, comfy, outputs, inputs)) in enumerate((MODULES | OUTSIDE).items()):
        block = "double_blocks.1." if own in MODULES else ""
        names = (own, f"{block}{authors}", f"{block}{comfy}", f"{block}{authors}")
        for style, name in zip(made, names, strict=True):
            made[style] |= pair(name, outputs, inputs, number)
    for number, ((flat, dotted), parts) in enumerate(FUSED.items()):
        whole = pair("x", 3 * HIDDEN, HIDDEN, 40 + number)
        rows = list(whole["x.lora_B.weight"].split(HIDDEN))
        block = "transformer_blocks.1.attn."
        made["diffusers"] |= split_streams(whole, "x", rows, [f"{block}{part}" for part in parts])
        single = [f"double_blocks.1.{flat.removesuffix('qkv')}{letter}" for letter in "qkv"]
        made["authors"] |= split_streams(whole, "x", rows, single)
        made["ComfyUI"] |= pair(f"double_blocks.1.{dotted}", 3 * HIDDEN, HIDDEN, 40 + number)
        made["HunyuanVideo"] |= pair(f"double_blocks.1.{flat}", 3 * HIDDEN, HIDDEN, 40 + number)
    whole = pair("x", 3 * HIDDEN, HIDDEN, 50)
    attention = "context_embedder.token_refiner.refiner_blocks.0.attn"
    rows = list(whole["x.lora_B.weight"].split(HIDDEN))
    made["diffusers"] |= split_streams(whole, "x", rows, [f"{attention}.to_{letter}" for letter in "qkv"])
    for style, name in (("authors", "_qkv"), ("ComfyUI", ".qkv"), ("HunyuanVideo", "_qkv")):
        made[style] |= pair(f"{REFINER}.self_attn{name}", 3 * HIDDEN, HIDDEN, 50)
    last = pair(LAST, 2 * HIDDEN, HIDDEN, 60)
    shift, scale = last[f"{LAST}.lora_B.weight"].chunk(2)
    made["diffusers"] |= split_streams(last, LAST, [torch.cat((scale, shift))], ["norm_out.linear"])
    for style in ("authors", "ComfyUI", "HunyuanVideo"):
        made[style] |= last
    return made


def base() -> Tensors:
    return small_hunyuan.reference().transformer.state_dict()


def fused(tensors: Tensors, strength: float) -> Tensors:
    """diffusers (0.42) has no LoRA in this pipeline, but in its transformer."""
    transformer = copy.deepcopy(small_hunyuan.reference().transformer)
    named = {f"transformer.{name}": tensor for name, tensor in tensors.items()}
    with warnings.catch_warnings():
        # PEFT warns that norm_out.linear is also the end of a name in the second block, which it then leaves alone.
        warnings.filterwarnings("ignore", "While injecting the PEFT adapters", RuntimeWarning)
        transformer.load_lora_adapter(named, adapter_name="own")
    transformer.set_adapters(["own"], [strength])
    transformer.fuse_lora()
    transformer.unload_lora()
    return transformer.state_dict()


PREFIXES = {"diffusers": "transformer.", "authors": "", "ComfyUI": "diffusion_model.", "HunyuanVideo": "transformer."}


@pytest.mark.default_cases("HunyuanVideo-single", "kohya-single")
@covering("style, mesh", [*PREFIXES, "kohya"], MESHES, strength=1)
def test_weights_are_those_that_diffusers_fuses(style: str, mesh: str, tmp_path: Path) -> None:
    made = styles()
    expected = fused(made["diffusers"], 0.7)
    if style == "kohya":
        modules = {key.split(".lora_")[0] for key in made["ComfyUI"]}
        tensors = {}
        for name in modules:
            flat = f"lora_unet_{name.replace('.', '_')}"
            tensors[f"{flat}.lora_down.weight"] = made["ComfyUI"][f"{name}.lora_A.weight"]
            tensors[f"{flat}.lora_up.weight"] = made["ComfyUI"][f"{name}.lora_B.weight"] / 3
            tensors[f"{flat}.alpha"] = torch.tensor(3.0 * RANK)
    else:
        tensors = {f"{PREFIXES[style]}{key}": tensor for key, tensor in made[style].items()}
    path = write(tmp_path / "a.safetensors", tensors)
    actual = loaded([Lora(path, 0.7)], mesh, directory=small_hunyuan.directory())
    assert error(actual, base()) > 0.1, "the LoRA does something"
    assert error(actual, expected) < 1e-5
    touched = {name for name, tensor in base().items() if not torch.equal(tensor, expected[name])}
    assert set(changed(actual, base())) == touched
    assert len(touched) == len(MODULES) + len(OUTSIDE) + 3 * len(FUSED) + 3 + 1


def test_every_module_has_a_name_of_the_authors_and_of_comfyui() -> None:
    """Two modules of one name would both get what is meant for one of them."""
    files = ModelFiles.open(small_hunyuan.directory())
    tensors = files.checkpoint(files.family.transformer).tensors
    targets = make_targets(tensors, hunyuan_lora.lora_names)
    for name, info in tensors.items():
        module = name.removesuffix(".weight")
        if name.endswith(".bias"):
            continue
        for alias in hunyuan_lora.lora_names(module, info.shape):
            assert not alias.startswith(("transformer_blocks", "context_embedder", "image_embedder")), alias
            found = [target.weight for target in targets.find(f"diffusion_model.{alias}")]
            assert name in found
            assert len(found) == (3 if alias.endswith("qkv") else 1), alias
            assert len(targets.find(f"lora_unet_{alias.replace('.', '_')}")) == len(found)


def test_the_one_that_begins_with_a_picture_takes_them_too() -> None:
    assert HUNYUAN15_IMAGE.denoiser.lora_names is hunyuan_lora.lora_names


def test_loras_of_wan_and_of_flux_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Blocks of Flux have the names of ComfyUI's here: the sizes tell."""
    files = ModelFiles.open(small_hunyuan.directory())
    path = write(tmp_path / "wan.safetensors", small_loras.kohya_style())
    with pytest.raises(InvalidValueError, match=r"fits nothing in model .*: use a LoRA made for HunyuanVideo-1\.5"):
        open_loras([Lora(path)], files)
    path = write(tmp_path / "flux.safetensors", small_flux_loras.comfy_style(small_flux_loras.factors()))
    with pytest.raises(InvalidValueError, match=r"changes .* by a tensor of shape .*: use a LoRA made for this size"):
        open_loras([Lora(path)], files)
    assert "the rest is applied" not in caplog.text
