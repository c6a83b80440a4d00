"""Converts between ComfyUI's types and ours. Outputs are plain host data: CPU tensors, without objects of ours."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from comfy_api.latest import InputImpl, Types, io

from comfy_tpu.errors import InvalidValueError
from comfy_tpu.finite import is_finite

if TYPE_CHECKING:
    from PIL.Image import Image

    from comfy_tpu.pipeline.sound import Waveform
    from comfy_tpu.pipeline.video_files import Frames

Conditioning = list[list[Any]]
Latent = dict[str, Any]

_UNSUPPORTED_KEYS = {
    "area": "Conditioning (Set Area)",
    "mask": "Conditioning (Set Mask)",
    "strength": "Conditioning (Set Area Strength)",
    "guidance": "a guidance node",
    "control": "Apply ControlNet",
    "gligen": "GLIGENTextBoxApply",
    "hooks": "a hook node",
    "clip_vision_output": "unCLIPConditioning or an image-to-video node",
    "concat_latent_image": "InpaintModelConditioning or an image-to-video node",
    "reference_latents": "ReferenceLatent",
}
"""Options of other nodes in a CONDITIONING that we do not support, and a node that sets each. Ignoring one would give a
different video."""
_INSTEAD = {
    "guidance": "set guidance_scale on the sampler",
    "clip_vision_output": "connect the family's Image Encoder (TPU) to image_embeds",
    "concat_latent_image": "connect the family's Image Encoder (TPU) to image_embeds",
    "reference_latents": "connect the family's Image Encoder (TPU) to image_embeds",
}


class TimedPrompt(NamedTuple):
    """An entry of a CONDITIONING."""

    embeds: Any
    extra: dict[str, Any]
    start: float
    """The share of the steps before its first one."""
    end: float


def to_conditioning(embeddings: Mapping[str, torch.Tensor], keys: Mapping[str, str]) -> Conditioning:
    """A CONDITIONING in float32, as ComfyUI's encoders return on a CPU; bfloat16 values are exact in float32."""
    return [[embeddings["text"].float(), {key: embeddings[name].float() for name, key in keys.items()}]]


def check_conditioning(name: str, conditioning: Any, steps: int) -> list[TimedPrompt]:
    """The prompts of a CONDITIONING, exactly one of them for each step; raises InvalidValueError for any other."""
    try:
        entries = [(entry[0], dict(entry[1])) for entry in conditioning]
    except (TypeError, ValueError, IndexError, KeyError):
        raise InvalidValueError(
            f"{name} is not a CONDITIONING; connect a Text Encoder (TPU) or CLIP Text Encode", field=name
        ) from None
    for _, extra in entries:
        for key, node in _UNSUPPORTED_KEYS.items():
            if extra.get(key) is not None and not (key == "strength" and extra[key] == 1.0):
                instead = _INSTEAD.get(key, "connect the text encoder without it")
                raise InvalidValueError(
                    f"{name} comes with {key}, from {node}, which is not read here; {instead}", field=name
                )
    prompts = [
        TimedPrompt(embeds, extra, extra.get("start_percent", 0.0), extra.get("end_percent", 1.0))
        for embeds, extra in entries
    ]
    for step in range(steps):
        count = sum(prompt.start <= step / steps < prompt.end for prompt in prompts)
        if count != 1:
            raise InvalidValueError(
                f"{name} holds {len(prompts)} prompts, {count or 'none'} of them for step {step + 1} of {steps}, "
                "expected one for each step; prompts of Conditioning (Combine) cannot overlap: write them as one, "
                "average them with Conditioning (Average), or give them ranges that follow each other with "
                "ConditioningSetTimestepRange",
                field=name,
            )
    return prompts


def from_conditioning(
    name: str, prompt: TimedPrompt, *, shapes: Mapping[str, tuple[int, ...]], keys: Mapping[str, str], pads_text: bool
) -> dict[str, torch.Tensor]:
    """The embeddings of one prompt, by the family's names. `pads_text`: a shorter text is padded with zeros."""
    embeds, extra = prompt.embeds, prompt.extra
    tokens, features = shapes["text"]
    if not isinstance(embeds, torch.Tensor) or embeds.ndim != 3 or embeds.shape[0] != 1:
        got = tuple(embeds.shape) if isinstance(embeds, torch.Tensor) else type(embeds).__name__
        raise InvalidValueError(f"{name} holds {got}, expected (1, tokens, features) of one prompt", field=name)
    if embeds.shape[2] != features:
        raise InvalidValueError(
            f"{name} has {embeds.shape[2]} features, this model_id wants {features}: those of another model; encode "
            "the prompt with the same model_id",
            field=name,
        )
    found = {"text": embeds, **{own: extra.get(key) for own, key in keys.items()}}
    for own, tensor in found.items():
        if not isinstance(tensor, torch.Tensor) or tensor.ndim != 1 + len(shapes[own]):
            raise InvalidValueError(
                f"{name} has no {own}, which this model reads; use the family's own text encoder", field=name
            )
        if not is_finite(tensor):
            raise InvalidValueError(f"{name} holds NaN or infinity; encode the prompt again", field=name)
    read = {own: tensor.detach().cpu().float() for own, tensor in found.items() if tensor is not None}
    missing = max(tokens - embeds.shape[1], 0) if pads_text else 0
    return read | {"text": torch.nn.functional.pad(read["text"], (0, 0, 0, missing))}


def from_frames(name: str, images: Any) -> Frames:
    """The frames of an IMAGE, [frames, height, width, channels] in 0..1, taken one by one."""
    from comfy_tpu.pipeline.video_files import Frames

    frames = _check_frames(name, images, "an IMAGE (frames, height, width, 3)", 4)
    return Frames(_as_uint8(frames[..., :3].expand(-1, -1, -1, 3)))


def from_mask(name: str, mask: Any) -> Frames:
    """The frames of a MASK, [frames, height, width] in 0..1; one stands for all frames of a video."""
    from comfy_tpu.pipeline.video_files import Frames

    mask = mask[None] if isinstance(mask, torch.Tensor) and mask.ndim == 2 else mask
    frames = _check_frames(name, mask, "a MASK (frames, height, width)", 3)
    return Frames(_as_uint8(frames[..., None].expand(-1, -1, -1, 3)), is_picture=len(frames) == 1)


def _check_frames(name: str, given: Any, expected: str, dimensions: int) -> torch.Tensor:
    is_frames = isinstance(given, torch.Tensor) and given.ndim == dimensions and given.numel() > 0
    if not is_frames or (dimensions == 4 and given.shape[3] not in (1, 3, 4)):
        got = tuple(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
        raise InvalidValueError(f"{name} is {got}, expected {expected}", field=name)
    if not is_finite(given):
        raise InvalidValueError(f"{name} holds NaN or infinity; make the frames again", field=name)
    frames: torch.Tensor = given.detach().cpu().float()
    return frames


def _as_uint8(values: torch.Tensor) -> Any:
    return (values.clamp(0, 1) * 255).round().byte().numpy()


def from_images(name: str, images: Any) -> Image:
    """The PIL image of an IMAGE that holds one, [1, height, width, channels] in 0..1."""
    from PIL.Image import fromarray

    if not isinstance(images, torch.Tensor) or images.ndim != 4 or images.shape[3] not in (1, 3, 4):
        got = tuple(images.shape) if isinstance(images, torch.Tensor) else type(images).__name__
        raise InvalidValueError(f"{name} is {got}, expected an IMAGE (1, height, width, 3)", field=name)
    if images.shape[0] != 1:
        raise InvalidValueError(
            f"{name} holds {images.shape[0]} images of {images.shape[2]}×{images.shape[1]}, expected one; choose one "
            "with Get Image from Batch",
            field=name,
        )
    if not is_finite(images):
        raise InvalidValueError(f"{name} holds NaN or infinity; make the image again", field=name)
    image = images[0, :, :, :3].detach().cpu().float().expand(-1, -1, 3)
    return fromarray(_as_uint8(image))


def to_latent(samples: torch.Tensor, *, is_image: bool = False, fps: int | None = None) -> Latent:
    """A LATENT [videos, channels, frames, height, width]; of images without the frames, as in ComfyUI. `fps`: where it
    decides what the samples mean; ComfyUI's nodes hand it on."""
    return {"samples": samples[:, :, 0] if is_image else samples, **({} if fps is None else {"fps": fps})}


def check_fps(name: str, latent: Latent, fps: int | None) -> None:
    """Raises InvalidValueError for a LATENT that says that it is of another frame rate."""
    if fps is not None and latent.get("fps", fps) != fps:
        raise InvalidValueError(
            f"{name} were made at {latent['fps']} frames a second, and their sound is as long; set fps to that",
            field="fps",
        )


def from_latent(name: str, latent: Any) -> torch.Tensor:
    samples = latent.get("samples") if isinstance(latent, dict) else None
    if not isinstance(samples, torch.Tensor):
        raise InvalidValueError(f"{name} is not a LATENT; connect a sampler or a VAE Encode", field=name)
    if samples.ndim == 4:  # images, as other samplers give them: a video of one frame each
        samples = samples.unsqueeze(2)
    if samples.ndim != 5:
        raise InvalidValueError(
            f"{name} have shape {tuple(samples.shape)}, expected (videos, channels, frames, height, width); "
            "connect a video sampler or a VAE Encode",
            field=name,
        )
    return samples.detach().cpu().float()


def to_images(parts: Iterable[torch.Tensor], frames: int) -> torch.Tensor:
    """Concatenates parts [videos, t, height, width, 3] to [videos * frames, height, width, 3]; frees each part."""
    images: torch.Tensor | None = None
    done = 0
    for part in parts:
        if images is None:
            images = torch.empty((part.shape[0], frames, *part.shape[2:]), dtype=torch.float32)
        images[:, done : done + part.shape[1]] = part
        done += part.shape[1]
    assert images is not None
    assert done == frames
    return images.flatten(0, 1)


def node_output(*results: Any) -> io.NodeOutput:
    """The outputs of a node; raises EscapeError if a device array, a traced tensor or a module is among them."""
    if "jax" not in sys.modules:  # a node that ran on a server: there is nothing of the kind in this process
        return io.NodeOutput(*results)
    from comfy_tpu.bridge import check_host_data  # imports JAX, which no node does before it runs

    for number, result in enumerate(results):
        check_host_data(result, f"output {number}")
    return io.NodeOutput(*results)


def to_audio(sound: Waveform) -> dict[str, Any]:
    """ComfyUI's AUDIO."""
    return {"waveform": sound.samples, "sample_rate": sound.rate}


def to_video(images: torch.Tensor, fps: float, audio: dict[str, Any] | None = None) -> Any:
    """ComfyUI's VIDEO: of several videos all frames, with the sounds one after the other."""
    if audio is not None and len(audio["waveform"]) > 1:
        audio = {**audio, "waveform": torch.cat(tuple(audio["waveform"]), dim=-1).unsqueeze(0)}
    components = Types.VideoComponents(images=images, frame_rate=Fraction(fps), **({"audio": audio} if audio else {}))
    return InputImpl.VideoFromComponents(components)
