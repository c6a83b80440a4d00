"""LTX-Video in single files, under the names of its authors, which ComfyUI's files have too."""

from __future__ import annotations

import re

from comfy_tpu.compiler.recorded_tensors import Tensors
from comfy_tpu.compiler.single_file import PartFile
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.card import Config
from comfy_tpu.families.shared.encoder_files import T5, rename_tensors

_VAE_NAMES = {
    r"\.res_blocks\.": ".resnets.",
    r"\.conv_shortcut\.": ".conv_shortcut.conv.",
    r"\.norm3\.norm\.": ".norm3.",
    r"^decoder\.last_time_embedder\.": "decoder.time_embedder.",
    r"^decoder\.last_scale_shift_table$": "decoder.scale_shift_table",
    r"^per_channel_statistics\.mean-of-means$": "latents_mean",
    r"^per_channel_statistics\.std-of-means$": "latents_std",
}
_BLOCK = re.compile(r"((?:encoder\.down|decoder\.up)_blocks)\.(\d+)\.(.+)")


def _convert_transformer(tensors: Tensors, config: Config) -> Tensors:
    from diffusers.loaders.single_file_utils import convert_ltx_transformer_checkpoint_to_diffusers

    converted: Tensors = convert_ltx_transformer_checkpoint_to_diffusers(tensors)
    return converted


def _convert_vae(tensors: Tensors, config: Config) -> Tensors:
    """diffusers' converter has a table for each version, and tells versions apart by the width of the published ones.

    Here the blocks of a file say what they are. Its authors count all of them, diffusers the groups of residual blocks.
    """
    conditioned = "decoder.last_scale_shift_table" in tensors
    if conditioned != bool(config.get("timestep_conditioning")):
        version, other = ("0.9.1 or later", "0.9.0") if conditioned else ("0.9.0", "0.9.1 or later")
        raise UnsupportedError(
            f"the VAE's file is that of LTX-Video {version}, its configuration that of {other}; choose the model "
            "directory or hub id of the file's version"
        )
    places = _block_places(tensors)
    placed: Tensors = {}
    for name, tensor in tensors.items():
        if match := _BLOCK.fullmatch(name):
            name = f"{places[match[1], int(match[2])]}.{match[3]}"
        placed[name] = tensor
    return rename_tensors(placed, _VAE_NAMES)


def _block_places(tensors: Tensors) -> dict[tuple[str, int], str]:
    """diffusers' name of each numbered block, by the list and number in the file."""
    places: dict[tuple[str, int], str] = {}
    for blocks, sampler, widening in (
        ("encoder.down_blocks", "downsamplers.0", "conv_out"),
        ("decoder.up_blocks", "upsamplers.0", "conv_in"),
    ):
        found = (match for match in map(_BLOCK.fullmatch, tensors) if match is not None and match[1] == blocks)
        kinds = {int(match[2]): _block_kind(match[3], sampler, widening) for match in found}
        groups = [number for number in sorted(kinds) if not kinds[number]]
        encodes = blocks.startswith("encoder")
        middle = groups[-1] if encodes else groups[0]
        for number, kind in kinds.items():
            before = sum(group < number for group in groups)
            # In the encoder the other blocks follow their group. In the decoder, whose first group is the middle, they
            # come before it.
            place = f"{blocks}.{before if encodes and not kind else before - 1}{kind}"
            places[blocks, number] = f"{blocks.partition('.')[0]}.mid_block" if number == middle else place
    return places


def _block_kind(inner: str, sampler: str, widening: str) -> str:
    """The place of a block beside its group of residual blocks; empty for the group itself."""
    if inner.startswith(("res_blocks.", "time_embedder.")):
        return ""
    return f".{sampler}" if inner.startswith("conv.") else f".{widening}"


SINGLE_FILES = {
    "transformer": PartFile(
        own="time_embed.emb.timestep_embedder.linear_1.weight",
        original="adaln_single.emb.timestep_embedder.linear_1.weight",
        convert=_convert_transformer,
        prefixes=("model.diffusion_model.",),
    ),
    "text_encoder": T5,
    "vae": PartFile(
        own="latents_mean",
        original="per_channel_statistics.mean-of-means",
        convert=_convert_vae,
        prefixes=("vae.", "first_stage_model."),
        ignored=("per_channel_statistics.channel", "per_channel_statistics.mean-of-stds*"),
    ),
}
