"""Random LoRAs for the small transformer, in the forms in which files come."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import WanPipeline
from safetensors.torch import save_file

from comfy_tpu.compiler.component import Component
from comfy_tpu.config import Lora
from comfy_tpu.parallel.mesh import make_placement
from comfy_tpu.pipeline.lora import open_loras
from comfy_tpu.pipeline.model_files import ModelFiles
from tests.pipeline import small_pipeline

HIDDEN, FFN, LAYERS = 96, 64, 3
TO_ORIGINAL = {
    "attn1.to_q": "self_attn.q",
    "attn1.to_k": "self_attn.k",
    "attn1.to_v": "self_attn.v",
    "attn1.to_out.0": "self_attn.o",
    "attn2.to_q": "cross_attn.q",
    "attn2.to_k": "cross_attn.k",
    "attn2.to_v": "cross_attn.v",
    "attn2.to_out.0": "cross_attn.o",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
}
SIZES = {"ffn.net.0.proj": (FFN, HIDDEN), "ffn.net.2": (HIDDEN, FFN)}
TOP = {"condition_embedder.time_proj": ("time_projection.1", 6 * HIDDEN, HIDDEN), "proj_out": ("head.head", 16, HIDDEN)}

Tensors = dict[str, torch.Tensor]


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.2


def factors(rank: int, seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(up, down) by the module's name in the checkpoint, for every block."""
    made = {}
    for layer in range(LAYERS):
        for number, module in enumerate(TO_ORIGINAL):
            outputs, inputs = SIZES.get(module, (HIDDEN, HIDDEN))
            own = 1000 * seed + 100 * layer + 2 * number
            made[f"blocks.{layer}.{module}"] = (
                random(outputs, rank, seed=own),
                random(rank, inputs, seed=own + 1),
            )
    return made


def original(module: str) -> str:
    _, layer, rest = module.split(".", 2)
    return f"blocks.{layer}.{TO_ORIGINAL[rest]}"


def diffusers_style(rank: int = 4, seed: int = 1) -> Tensors:
    tensors = {}
    for module, (up, down) in factors(rank, seed).items():
        tensors |= {f"transformer.{module}.lora_A.weight": down, f"transformer.{module}.lora_B.weight": up}
    return tensors


def kohya_style(rank: int = 4, seed: int = 1, alpha: float = 2.0) -> Tensors:
    tensors = {}
    for module, (up, down) in factors(rank, seed).items():
        name = f"lora_unet_{original(module).replace('.', '_')}"
        tensors |= {
            f"{name}.lora_down.weight": down,
            f"{name}.lora_up.weight": up,
            f"{name}.alpha": torch.tensor(alpha),
        }
    return tensors


def comfy_style(rank: int = 4, seed: int = 1, alpha: float | None = 8.0) -> Tensors:
    tensors = {}
    for module, (up, down) in factors(rank, seed).items():
        name = f"diffusion_model.{original(module)}"
        tensors |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
        if alpha is not None:
            tensors[f"{name}.alpha"] = torch.tensor(alpha)
    return tensors


def original_style(rank: int = 4, seed: int = 1) -> Tensors:
    """lora_A and lora_B under the original names, with biases, and layers outside the blocks."""
    tensors = {}
    for module, (up, down) in factors(rank, seed).items():
        name = f"diffusion_model.{original(module)}"
        tensors |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
        tensors[f"{name}.diff_b"] = random(up.shape[0], seed=seed + 5)
    for name, outputs, inputs in TOP.values():
        tensors[f"diffusion_model.{name}.lora_A.weight"] = random(rank, inputs, seed=seed + 6)
        tensors[f"diffusion_model.{name}.lora_B.weight"] = random(outputs, rank, seed=seed + 7)
        tensors[f"diffusion_model.{name}.diff_b"] = random(outputs, seed=seed + 8)
    return tensors


STYLES: dict[str, Any] = {
    "diffusers": diffusers_style,
    "kohya": kohya_style,
    "comfy": comfy_style,
    "comfy without alpha": functools.partial(comfy_style, alpha=None),
    "original": original_style,
}


def write(path: Path, tensors: Tensors, adapter: dict[str, Any] | None = None) -> Path:
    metadata = {"lora_adapter_metadata": json.dumps(adapter)} if adapter else None
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path, metadata)
    return path


def pipeline(*loras: tuple[Path, float], scheduler: Any = None) -> WanPipeline:
    """diffusers' small pipeline, with the LoRAs in its transformer's weights."""
    parts = {name: getattr(small_pipeline.reference(), name) for name in ("tokenizer", "text_encoder", "vae")}
    reference = small_pipeline.reference()
    made = WanPipeline(
        **parts,
        transformer=copy.deepcopy(reference.transformer),
        scheduler=scheduler or copy.deepcopy(reference.scheduler),
    )
    made.set_progress_bar_config(disable=True)
    for path, strength in loras:  # one by one: PEFT refuses adapters with and without a bias beside each other
        made.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name="own")
        made.set_adapters(["own"], [strength])
        made.fuse_lora()
        made.unload_lora_weights()
    return made


def fused(*loras: tuple[Path, float]) -> Tensors:
    """The weights of the small transformer after diffusers has put the LoRAs into them."""
    return pipeline(*loras).transformer.state_dict()


def loaded(
    loras: list[Lora], mesh: str = "single", *, directory: Path | None = None, transformer: int = 0, **options: Any
) -> dict[str, np.ndarray]:
    """A transformer's weights as they are on the devices, by their names in the checkpoint."""
    files = ModelFiles.open(directory or small_pipeline.directory())
    spec = files.family.denoiser.transformers[transformer]
    component = Component(
        spec, files.config(spec), make_placement(mesh, platform="cpu"), **({"dtype": torch.float32} | options)
    )
    opened = open_loras(loras, files).for_transformer(transformer)
    arrays = component.load(files.checkpoint(spec), changes=opened if opened.key else None)
    weights = {}
    for slot in component.slots:
        array = arrays[slot.name]
        assert array.sharding.is_equivalent_to(slot.sharding, array.ndim), slot.name
        assert array.dtype == slot.dtype
        values = np.asarray(array.astype(np.float32) if slot.dtype.itemsize == 2 else array)
        layered = slot.sources != (slot.name,)
        weights |= {name: values[index] if layered else values for index, name in enumerate(slot.sources)}
    return weights


def error(actual: dict[str, np.ndarray], expected: Tensors) -> float:
    """The largest of any tensor, relative to its largest value."""
    assert set(expected) <= set(actual)
    return max(
        float(np.abs(actual[name] - tensor.numpy()).max() / np.abs(tensor.numpy()).max())
        for name, tensor in expected.items()
    )


def changed(weights: dict[str, np.ndarray], base: Tensors) -> list[str]:
    return [name for name, tensor in base.items() if not np.array_equal(weights[name], tensor.numpy())]
