"""VAE: runs decode and encode of the first-stage model on the devices, by patches on a copy."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch

from comfy_tpu.comfy.native.attention import pixel_attention
from comfy_tpu.comfy.native.hosting import Choices, Host, pixel_size
from comfy_tpu.comfy.native.replacement import Replacement
from comfy_tpu.comfy.native.tiles import HiddenPadding, can_pad_tiles, is_in_tiles, mark_tiles
from comfy_tpu.comfy.run import report_idle

if TYPE_CHECKING:
    from comfy.sd import VAE

WHOLE_MESH = ("dp", "sp", "tp")


def compile_vae(vae: VAE, choices: Choices) -> VAE:
    """A copy whose decode and encode compute on the devices. Tiling and everything else stay ComfyUI's."""
    compiled = copy.copy(vae)
    compiled.patcher = vae.patcher.clone()
    for name in ("decode", "encode"):
        method = DeviceMethod(vae.first_stage_model, "", name, choices)
        method.scale = _scale(vae) if name == "decode" else (1, 1)
        compiled.patcher.add_object_patch(name, method)
    mark_tiles(compiled)
    # ComfyUI cuts a batch where the host has no memory free for it. It takes none there, and every cut would be a
    # program of its own.
    compiled.memory_used_decode = compiled.memory_used_encode = lambda shape, dtype: 1
    return compiled


def _scale(vae: VAE) -> tuple[int | None, int | None]:
    """Pixels on a side, and frames, for one latent."""
    spatial = vae.spacial_compression_decode()
    return spatial if isinstance(spatial, int) else None, vae.temporal_compression_decode()


class DeviceMethod(Replacement):
    """Replaces `first_stage_model.decode` or `.encode`."""

    part = "vae"
    scale: tuple[int | None, int | None] = (None, None)
    """Pixels and frames for one of what is given; None where that is unknown."""

    @staticmethod
    def _prepare(skeleton: torch.nn.Module) -> None:
        part: Any
        for part in skeleton.modules():
            if hasattr(part, "optimized_attention"):
                part.optimized_attention = pixel_attention

    def _kind(self, x: torch.Tensor, **options: Any) -> Hashable:
        return x.ndim, frozenset(options), is_in_tiles()

    def _run_on_devices(self, host: Host, x: torch.Tensor, **options: Any) -> torch.Tensor:
        host.size = pixel_size(x.shape[2:], *self.scale)
        values = x.to(host.dtype)
        if _is_causal(self._module):
            result = _run_by_frames(host, self._module, self._method, values)
        elif is_in_tiles() and can_pad_tiles(self._module, x):
            result = _run_tile(host, self._method, values, options)
        else:
            result = host(_METHODS[self._method], values, options, axes=_axes(values))
        host.show_end()
        report_idle()
        return result.to(x.dtype)


def _decode(module: Any, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    return type(module).decode(module, x, **options)  # the class's own: the skeleton may have our replacement on it


def _encode(module: Any, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    return type(module).encode(module, x, **options)


_METHODS = {"decode": _decode, "encode": _encode}


def _run_tile(host: Host, name: str, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Runs a tile in the program of a larger one, if there is one."""
    height, width = x.shape[2:]

    def run(padded: tuple[int, ...]) -> torch.Tensor:
        rows, columns = padded
        tile = torch.nn.functional.pad(x, (0, columns - width, 0, rows - height))
        result = host(_TILE_METHODS[name], tile, torch.tensor([height, width]), options, axes=_axes(x))
        return result[..., : result.shape[-2] * height // rows, : result.shape[-1] * width // columns]

    return host.run_padded((name, len(x), x.dtype, repr(options)), (height, width), run)


def _decode_tile(module: Any, x: torch.Tensor, sides: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    with HiddenPadding((x.shape[2], x.shape[3]), sides):
        return _decode(module, x, options)


def _encode_tile(module: Any, x: torch.Tensor, sides: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    with HiddenPadding((x.shape[2], x.shape[3]), sides):
        return _encode(module, x, options)


_TILE_METHODS = {"decode": _decode_tile, "encode": _encode_tile}


def _axes(x: torch.Tensor) -> tuple[Any, ...]:
    """The axes of an image: columns over the whole mesh."""
    return (*(None,) * (x.ndim - 1), WHOLE_MESH)


# Wan's VAEs go through a video a few frames at a time and remember the frames before. ComfyUI's loop over them would
# be one program that grows with the video; a frame with its memory is one program for all but the first two.


def _is_causal(module: torch.nn.Module) -> bool:
    return type(module).__module__ in ("comfy.ldm.wan.vae", "comfy.ldm.wan.vae2_2")


def _run_by_frames(host: Host, module: torch.nn.Module, name: str, x: torch.Tensor) -> torch.Tensor:
    function: Callable[..., Any] = _decode_part if name == "decode" else _encode_part
    memory: Any = None
    results = []
    for begin, end in _parts(module, name, x.shape[2]):
        result, memory = host(function, x[:, :, begin:end], memory, axes=_axes(x), fetch=False)
        results.append(host.fetch(result))
    return torch.cat(results, dim=2)


def _parts(module: Any, name: str, frames: int) -> list[tuple[int, int]]:
    """(begin, end) of each part: the first frame alone, then as many as make one latent: one latent frame, or four
    images.

    In ComfyUI 0.33, as many as make two: a layer there looks two frames back but caches only frames of the part before,
    and the encoder holds back the result of a part that makes a single frame. The last part may be shorter.
    """
    pairs = _remembers_one_part(module)
    if name == "decode":
        step = 2 if pairs else 1
    else:
        halvings = sum(getattr(part, "mode", "") == "downsample3d" for part in module.encoder.modules())
        frames, step = 1 + (frames - 1) // 4 * 4, 2 * 2**halvings if pairs else 4
    return [(0, 1), *((begin, min(begin + step, frames)) for begin in range(1, frames, step))]


def _remembers_one_part(module: Any) -> bool:
    return hasattr(_source_module(module), "count_cache_layers")


def _source_module(module: Any) -> Any:
    return sys.modules[type(module).__module__]


def _decode_part(module: Any, z: torch.Tensor, memory: list[Any] | None) -> tuple[torch.Tensor, list[Any]]:
    code = _source_module(module)
    slots = _cache_slots(module, module.decoder, memory)
    if memory is not None:  # as ComfyUI's loop has it where an upsampling saw only the first frame
        slots = ["Rep" if entry is None else entry for entry in slots]
    first = {"first_chunk": memory is None} if hasattr(code, "unpatchify") else {}
    out = module.decoder(module.conv2(z), feat_cache=slots, feat_idx=[0], **first)
    out = torch.cat(out, 2) if isinstance(out, list) else out
    if hasattr(code, "unpatchify"):  # Wan 2.2
        out = code.unpatchify(out, patch_size=2)
    return out, _drop_markers(slots)


def _encode_part(module: Any, x: torch.Tensor, memory: list[Any] | None) -> tuple[torch.Tensor, list[Any]]:
    code = _source_module(module)
    if hasattr(code, "patchify"):
        x = code.patchify(x, patch_size=2)
    slots = _cache_slots(module, module.encoder, memory)
    last = {"final": True} if _remembers_one_part(module) else {}  # holds nothing back
    out = module.encoder(x, feat_cache=slots, feat_idx=[0], **last)
    mean, _ = module.conv1(out).chunk(2, dim=1)
    return mean, _drop_markers(slots)


def _cache_slots(module: Any, part: torch.nn.Module, memory: list[Any] | None) -> list[Any]:
    code = _source_module(module)
    count = code.count_cache_layers if _remembers_one_part(module) else code.count_conv3d
    return [None] * count(part) if memory is None else list(memory)


def _drop_markers(slots: list[Any]) -> list[Any]:
    return [None if isinstance(entry, str) else entry for entry in slots]
