"""Inputs and outputs that several nodes share, each defined once: range, default, tooltip.

Ranges and defaults come from the family cards; the command line allows up to the limits of a model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from comfy_api.latest import io

from comfy_tpu.comfy.models import model_choices
from comfy_tpu.config import (
    CONTROL_STRENGTH,
    INIT_IMAGE_STRENGTH,
    INIT_VIDEO_STRENGTH,
    Lora,
    RemoteServer,
    RunOptions,
    SecondPass,
    SingleFiles,
)
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.card import NodeSet, VideoInput
from comfy_tpu.hub.download import ALLOWED_BYTES
from comfy_tpu.hub.sizes import format_bytes

SIZE_MIN, FRAMES_MIN = 256, 17

LORA_TYPE = io.Custom("TPU_LORA")
"""A tuple of `Lora`."""

OPTIONS_TYPE = io.Custom("TPU_OPTIONS")
"""`RunOptions`."""

SERVER_TYPE = io.Custom("TPU_SERVER")
"""`RemoteServer`."""

REFERENCES = ("image", "image_2", "image_3", "image_4")

PIPELINE_TYPE = io.Custom("TPU_PIPELINE")
"""A model: the name of a `model_id`, or `SingleFiles`."""

IMAGE_TYPE = io.Custom("TPU_IMAGE_EMBEDS")
"""Encoded images: tensors by name."""


def noun(family: NodeSet) -> str:
    return "image" if family.makes_images else "video"


def resize_text(family: NodeSet) -> str:
    """A phrase for tooltips: how an image of another size becomes a frame."""
    return "of which the center is taken, in the video's shape" if family.crops_images else "resized to the video's"


def prompt(family: NodeSet) -> io.Input:
    return io.String.Input(
        "prompt",
        multiline=True,
        dynamic_prompts=True,
        tooltip=f"What the {noun(family)} should show, {family.words.languages}.",
    )


def negative_prompt(family: NodeSet) -> io.Input:
    return io.String.Input(
        "negative_prompt",
        multiline=True,
        dynamic_prompts=True,
        default="",
        tooltip=f"What the {noun(family)} should not show. {family.words.negative_prompt} Empty: the model's own; a "
        "space: nothing.",
    )


def prompt_embeds(family: NodeSet) -> io.Input:
    return io.Conditioning.Input(
        "prompt_embeds",
        tooltip=f"The prompt, from {family.name} Text Encoder (TPU){family.words.native_text_encoder}.",
    )


def negative_prompt_embeds(family: NodeSet) -> io.Input:
    tooltip = f"The negative prompt. {family.words.negative_prompt}"
    return io.Conditioning.Input("negative_prompt_embeds", tooltip=tooltip)


_OWN: dict[str, int] = {
    **dict.fromkeys(("height", "width", "num_frames", "num_inference_steps", "flow_shift", "fps"), 0),
    **dict.fromkeys(("guidance_scale", "guidance_scale_2", "cfg_normalization", "stg_scale", "stg_block"), -1),
    **dict.fromkeys(("modality_scale", "guidance_rescale", "audio_guidance_scale", "audio_stg_scale"), -1),
    **dict.fromkeys(("audio_modality_scale", "audio_guidance_rescale"), -1),
}
"""The values of number widgets that mean the model's own: 0, or -1 where 0 means something."""


def drop_own(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The chosen settings without those that are to be the model's own."""
    return {name: value for name, value in chosen.items() if value != "" and (name not in _OWN or value != _OWN[name])}


def _number(
    family: NodeSet,
    name: str,
    most: float,
    tooltip: str,
    *,
    least: float = 0,
    step: float | None = None,
    keeps_number: bool | None = None,
) -> io.Input:
    """A number widget of a setting. `least`: the smallest value where the widget starts with a number of the model's;
    `keeps_number`: whether it does, else as the nodes of the family do."""
    default = getattr(family.defaults, name)
    kind = io.Int.Input if isinstance(default, int) else io.Float.Input
    values: dict[str, Any] = {"default": default, "min": least, "max": most}
    if not (family.keeps_numbers if keeps_number is None else keeps_number):
        values |= {"default": _OWN[name], "min": _OWN[name]}
        tooltip = f"{tooltip} {_OWN[name]}: the model's own."
    if kind is io.Float.Input:
        values |= {"default": float(values["default"]), "min": float(values["min"])}
    return kind(name, **values, **({} if step is None else {"step": step}), tooltip=tooltip)


def size_inputs(family: NodeSet, *, keeps_numbers: bool | None = None) -> list[io.Input]:
    """Height, width and frames."""
    sides = [
        _number(
            family,
            side,
            family.size_max,
            _size_tooltip(family, side.capitalize()),
            least=SIZE_MIN,
            step=family.limits.size_multiple,
            keeps_number=keeps_numbers,
        )
        for side in ("height", "width")
    ]
    if family.makes_images:
        return sides
    multiple, keeps = family.limits.frames_multiple, family.keeps_numbers if keeps_numbers is None else keeps_numbers
    frames = _number(
        family,
        "num_frames",
        family.frames_max,
        f"Frames of the video{f': {multiple}n+1' if multiple > 1 else ''}. {family.words.frames}",
        least=FRAMES_MIN,
        step=multiple if keeps else 1,  # a widget that starts at 0 would only reach multiples of its step
        keeps_number=keeps_numbers,
    )
    return [*sides, frames]


def sampling_inputs(family: NodeSet) -> list[io.Input]:
    """Height to flow_shift, in the order of the node table."""
    motion = "finer" if family.makes_images else "finer; below 20 motion suffers"
    shift_text = f"How long to stay at high noise: {family.words.flow_shift}."
    shift = (
        [] if family.makes_images else [_number(family, "flow_shift", family.shift_max, shift_text, least=1, step=0.1)]
    )
    steps_text = f"Denoising steps. Fewer are faster, more are {motion}."
    second = "The same for the low-noise transformer of models that have two. 0 takes guidance_scale for both."
    norm = (
        "The most that guidance may make of a velocity's norm, in norms of the prompt's own: 1 keeps it. 0 is no limit."
    )
    return [
        *size_inputs(family),
        _number(family, "num_inference_steps", 100, steps_text, least=1),
        _number(family, "guidance_scale", 20.0, family.words.guidance, step=0.1),
        *([_number(family, "guidance_scale_2", 20.0, second, step=0.1)] if family.has_second_guidance else []),
        *([_number(family, "cfg_normalization", 10.0, norm, step=0.05)] if family.normalizes_guidance else []),
        *(_sound_guidance(family) if family.makes_sound else []),
        io.Int.Input(
            "seed",
            default=family.defaults.seed,
            min=0,
            max=2**64 - 1,
            control_after_generate=True,
            tooltip=f"The same seed with the same settings is the same {noun(family)}, bit for bit on the same chips "
            "and mesh, nearly on others.",
        ),
        *shift,
    ]


def media_inputs(family: NodeSet) -> list[io.Input]:
    """Images, videos and their strengths, of models that take videos."""
    frames = family.image_role == "first_frame" and not family.has_image_encoder
    images = [frame(family, "image", "first"), frame(family, "last_image", "last")] if frames else []
    if family.image_role == "reference":
        needed = any(image.required for image in family.image_inputs)
        images = [reference(family, "image", optional=not needed)]
    return [
        *images,
        *map(_video, family.video_inputs),
        *(reference(family, name) for name in reference_names(family)),
        *([_strength()] if family.starts_from_video else []),
        *([_control_strength()] if family.has_control_strength else []),
    ]


def reference_names(family: NodeSet) -> tuple[str, ...]:
    """Names of the inputs of reference images beside others."""
    return tuple(
        "reference" if number == 1 else f"reference_{number}" for number in range(1, family.max_references + 1)
    )


def _video(video: VideoInput) -> io.Input:
    words = re.sub("--([a-z-]+)", lambda flag: flag[1].replace("-", "_"), video.words)
    needs = f" With {' and '.join(video.needs)}." if video.needs else ""
    optional = not video.required and video.role != "initial"
    if video.role == "mask":
        tooltip = f"A mask: {words}. One for each frame, or one for all.{needs}"
        return io.Mask.Input(video.name, optional=optional, tooltip=tooltip)
    tooltip = f"{words[:1].upper()}{words[1:]}: frames, such as those of Load Video, taken one by one.{needs}"
    return io.Image.Input(video.name, optional=optional, tooltip=tooltip)


def _strength() -> io.Input:
    return io.Float.Input(
        "strength",
        default=INIT_VIDEO_STRENGTH,
        min=0.01,
        max=1.0,
        step=0.01,
        tooltip="How much of the video is redrawn: 1 is all of it.",
    )


def _control_strength() -> io.Input:
    return io.Float.Input(
        "control_strength",
        default=CONTROL_STRENGTH,
        min=0.0,
        max=10.0,
        step=0.05,
        tooltip="The effect of the video and the references. 0: none.",
    )


_SOUND_GUIDANCE: dict[str, tuple[float, str]] = {
    "stg_scale": (
        10.0,
        "How far to go from what the model says without the self-attention of block stg_block. 0 saves that branch.",
    ),
    "modality_scale": (20.0, "How closely video and sound follow each other. 1 saves the branch that compares them."),
    "guidance_rescale": (1.0, "How much of the contrast that guidance adds is taken back."),
    "audio_guidance_scale": (20.0, "guidance_scale of the sound. 0 takes the video's."),
    "audio_stg_scale": (10.0, "stg_scale of the sound. 0 takes the video's."),
    "audio_modality_scale": (20.0, "modality_scale of the sound. 0 takes the video's."),
    "audio_guidance_rescale": (1.0, "guidance_rescale of the sound. 0 takes the video's."),
}
"""The largest value of a widget, and what it does."""


def _sound_guidance(family: NodeSet) -> list[io.Input]:
    """Guidance beyond the prompt's, which is computed where guidance_scale is over 1."""
    words = "The block, from 0, whose self-attention stg_scale compares with."
    block = _number(family, "stg_block", family.limits.blocks - 1, words)
    scales = [_number(family, name, most, text, step=0.05) for name, (most, text) in _SOUND_GUIDANCE.items()]
    return [scales[0], block, *scales[1:]]


def image_inputs(family: NodeSet) -> list[io.Input]:
    """The image inputs of a full pipeline node."""
    if family.has_video_encoder and not family.has_image_encoder:
        return media_inputs(family)
    if family.image_role is None:
        return []
    if family.image_role == "initial":
        return init_image_inputs()
    if family.image_role == "reference":
        return [reference(family, name) for name in REFERENCES]
    last = [frame(family, "last_image", "last")] if family.has_last_image else []
    return [frame(family, "image", "first"), *last]


def reference_inputs(family: NodeSet) -> list[io.Input]:
    """Inputs of a node that needs one reference image and takes more."""
    return [reference(family, name, optional=name != REFERENCES[0]) for name in REFERENCES]


def reference(family: NodeSet, name: str, *, optional: bool = True) -> io.Input:
    return io.Image.Input(
        name,
        optional=optional,
        tooltip=f"A reference image: one, of any size. {family.words.references}",
    )


def frame(family: NodeSet, name: str, which: str) -> io.Input:
    return io.Image.Input(
        name,
        optional=True,
        tooltip=f"The {which} frame, for models that take one: one image of any size, {resize_text(family)}.",
    )


def init_image_inputs() -> list[io.Input]:
    return [
        io.Image.Input(
            "image", optional=True, tooltip="An image to start from: one, of any size, resized to height and width."
        ),
        io.Float.Input(
            "strength",
            default=INIT_IMAGE_STRENGTH,
            min=0.01,
            max=1.0,
            step=0.01,
            optional=True,
            tooltip="How much of the image is redrawn: 1 is all of it. Without an image it has no effect.",
        ),
    ]


def image_embeds(family: NodeSet) -> io.Input:
    use = "reference images" if family.image_role == "reference" else "models that begin with an image"
    encoders = [f"{family.name} Image Encoder (TPU), for {use}"] if family.has_image_encoder else []
    encoders += [f"{family.name} Video Encoder (TPU), for given videos"] if family.has_video_encoder else []
    return IMAGE_TYPE.Input("image_embeds", optional=True, tooltip=f"From {', or from '.join(encoders)}.")


def latents(family: NodeSet) -> io.Input:
    name = family.name
    others = "" if family.makes_sound else f", or from any ComfyUI sampler or VAE Encode of {name}"
    return io.Latent.Input("latents", tooltip=f"From {name} TPU Sampler{others}.")


def start_inputs(family: NodeSet) -> list[io.Input]:
    """Latents to start from, and how much of them is redrawn. Segments of a video have none."""
    if family.makes_segments:
        return []
    strength = io.Float.Input(
        "strength",
        default=SecondPass(0.0).strength,
        min=0.01,
        max=1.0,
        step=0.01,
        optional=True,
        tooltip="How much of the latents is redrawn, as a share of the steps: 1 is all of them. Without latents it has "
        "no effect.",
    )
    use = f"Latents to start from: {noun(family)}s of this sampler, made again at the size chosen here"
    others = "" if family.makes_sound else f", or those of any ComfyUI sampler or VAE Encode of {family.name}"
    latents = io.Latent.Input(
        "initial_latents", optional=True, tooltip=f"{use}{others}. They are resized, and take the place of noise alone."
    )
    return [latents, strength]


def fps(family: NodeSet) -> io.Input:
    read = " The model reads it: the same in sampler and decoder." if family.reads_fps else ""
    words = f"Frames a second of the video. {family.name} was trained at {family.words.trained_fps}.{read}"
    return _number(family, "fps", 240, words, least=1)


def model_id(family: NodeSet) -> io.Input:
    places = (
        "A model of the Hugging Face hub, to be fetched by comfy-tpu download if it is over "
        f"{format_bytes(ALLOWED_BYTES)}; a directory in ComfyUI's models/diffusers"
    )
    demo = (
        "; or demo and demo-image, small models that come with the pack: moving shapes at 64×64, the second from an "
        "image"
    )
    return io.Combo.Input(
        "model_id",
        options=model_choices(family),
        default=family.hub_models[0],
        tooltip=f"{places}{demo if family.has_demo_models else ''}.",
    )


def scheduler(family: NodeSet) -> io.Input:
    return io.Combo.Input(
        "scheduler",
        options=list(family.limits.schedulers),
        default=family.defaults.scheduler,
        optional=True,
        tooltip=f"The solver. {family.words.schedulers}.",
    )


def lora() -> io.Input:
    return LORA_TYPE.Input(
        "lora", optional=True, tooltip="From TPU Load LoRA. Another file or strength loads the model again."
    )


def pipeline() -> io.Input:
    return PIPELINE_TYPE.Input(
        "pipeline", optional=True, tooltip="From TPU Load Pipeline: the model, in place of model_id."
    )


def choose_model(model_id: str, given: Any) -> str | SingleFiles:
    """The model of a pipeline link, or of `model_id` where it is absent (None)."""
    if given is not None and not isinstance(given, (str, SingleFiles)):
        raise InvalidValueError(
            f"pipeline is a {type(given).__name__}, expected what TPU Load Pipeline gives", field="pipeline"
        )
    return model_id if given is None else given


def options(wins_over: str = "") -> io.Input:
    """`wins_over`: the end of the tooltip, for nodes with inputs of the same meaning."""
    tooltip = (
        f"From TPU Options: chips, precision, attention and savings. Without it everything is automatic.{wins_over}"
    )
    return OPTIONS_TYPE.Input("options", optional=True, tooltip=tooltip)


def server() -> io.Input:
    return SERVER_TYPE.Input(
        "server", optional=True, tooltip="From TPU Server: runs there. Without it, on this machine."
    )


def frame_outputs(family: NodeSet) -> list[io.Output]:
    if family.makes_images:
        return [io.Image.Output("images", tooltip="The image, or one for each latent, for ComfyUI's image nodes.")]
    sound = " with its sound" if family.makes_sound else ""
    return [
        io.Image.Output("frames", tooltip="Every frame, for ComfyUI's image and video nodes and VideoHelperSuite."),
        io.Float.Output("fps_out", display_name="fps", tooltip="Frames per second, for nodes that make a video."),
        io.Video.Output("video", tooltip=f"The same frames as a video{sound}, for Save Video."),
        *([io.Audio.Output("audio", tooltip="The sound, as long as the frames.")] if family.makes_sound else []),
    ]


def frames_problem(family: NodeSet, num_frames: Any) -> str | None:
    """The problem with a num_frames widget as a sentence, or None. ComfyUI checks ranges, but not 4n+1."""
    step, most = family.limits.frames_multiple, family.frames_max
    if num_frames == _OWN["num_frames"]:
        return None
    if not FRAMES_MIN <= num_frames <= most:
        return f"num_frames={num_frames} is outside {FRAMES_MIN} to {most}"
    if (num_frames - 1) % step:
        below = (num_frames - 1) // step * step + 1
        return f"num_frames={num_frames} is not {step}n+1; use {below} or {below + step}"
    return None


def check_integers(**values: Any) -> None:
    """Raises InvalidValueError for a value that is not an integer: a link can pass any type."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidValueError(f"{name}={value!r} is not a whole number", field=name)


def check_loras(given: Any) -> tuple[Lora, ...]:
    """The LoRAs of a link, which may be absent (empty); raises InvalidValueError for a value of another type."""
    if given is None:
        return ()
    if not isinstance(given, tuple) or not all(isinstance(each, Lora) for each in given):
        raise InvalidValueError(f"lora is a {type(given).__name__}, expected what TPU Load LoRA gives", field="lora")
    return given


def check_options(given: Any) -> RunOptions:
    """The options of a link, which may be absent (the defaults); raises InvalidValueError for a value of another
    type."""
    if given is None:
        return RunOptions()
    if not isinstance(given, RunOptions):
        raise InvalidValueError(
            f"options is a {type(given).__name__}, expected what TPU Options gives", field="options"
        )
    return given


def check_server(given: Any) -> RemoteServer | None:
    """The server of a link, which may be absent (None); raises InvalidValueError for a value of another type."""
    if given is not None and not isinstance(given, RemoteServer):
        raise InvalidValueError(f"server is a {type(given).__name__}, expected what TPU Server gives", field="server")
    return given


def _size_tooltip(family: NodeSet, side: str) -> str:
    demo = " demo and demo-image always draw 64×64." if family.has_demo_models else ""
    return f"{side} in pixels, a multiple of {family.limits.size_multiple}. {family.words.sizes}{demo}"
