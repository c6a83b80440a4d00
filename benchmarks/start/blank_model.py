"""A model directory of Wan 2.1 14B's shapes whose weights are zeros that take no room on the disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.wan_directory import write_small_files
from comfy_tpu.families.wan.card import WAN21

UMT5_XXL = {"d_model": 4096, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "d_kv": 64, "vocab_size": 256384}


def make_blank_model(directory: Path) -> None:
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    with torch.device("meta"):
        transformer = WanTransformer3DModel(**WAN21.published["Wan-AI/Wan2.1-T2V-14B-Diffusers"])
        vae = AutoencoderKLWan()
        text = UMT5EncoderModel(UMT5Config(**UMT5_XXL))
    for name, module, file in (
        ("transformer", transformer, "diffusion_pytorch_model"),
        ("vae", vae, "diffusion_pytorch_model"),
        ("text_encoder", text, "model"),
    ):
        (directory / name).mkdir(parents=True)
        _write_zeros(directory / name / f"{file}.safetensors", module)
    transformer.save_config(directory / "transformer")
    vae.save_config(directory / "vae")
    text.config.architectures = ["UMT5EncoderModel"]
    text.config.save_pretrained(directory / "text_encoder")
    write_small_files(directory)


def _write_zeros(path: Path, module: Any) -> None:
    """A safetensors file with a header and a hole."""
    header, end = {}, 0
    for name, tensor in module.state_dict().items():
        if name == "encoder.embed_tokens.weight":  # the same as shared.weight
            continue
        begin, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
