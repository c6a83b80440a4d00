"""The options that commands share, each defined once. None: not chosen, so that the model's default applies."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

if TYPE_CHECKING:
    from comfy_tpu.pipeline.given_media import GivenMedia

from comfy_tpu.cli import card_texts
from comfy_tpu.config import (
    CONTEXT_WHOLE,
    CONTROL_STRENGTH,
    FAST,
    INIT_IMAGE_STRENGTH,
    INIT_VIDEO_STRENGTH,
    VAE_BACKEND,
    VAE_BACKENDS,
    AttentionConfig,
    AttentionImplementation,
    Context,
    ContextNoise,
    ContextWeights,
    SecondPass,
    SingleFiles,
    UpscaleBy,
)
from comfy_tpu.errors import ComfyTpuError, InvalidValueError
from comfy_tpu.families.card import VIDEO_NAMES
from comfy_tpu.jobs.request import parse_lora
from comfy_tpu.parallel.hosts import first_host_value
from comfy_tpu.pipeline.atomic import find_half_character

Name = TypeVar("Name", bound=str)

TINY = "tiny"
"""The value of --vae and --vae-backend that decodes by --tiny-vae."""


@dataclasses.dataclass(frozen=True)
class Option:
    field: str
    """The field of GenerationSettings."""
    flags: tuple[str, ...]
    help: str
    help_from_cards: Callable[[], str] = lambda: ""
    """Returns the end of the help text, from the family cards."""


SETTINGS = (
    Option("negative_prompt", ("--negative-prompt",), "what the video should not show; a space: nothing"),
    Option("height", ("--height",), "pixels"),
    Option("width", ("--width",), "pixels"),
    Option("num_frames", ("--num-frames",), "frames: ", card_texts.frame_counts),
    Option("num_inference_steps", ("--steps", "--num-inference-steps"), "denoising steps"),
    Option("guidance_scale", ("--guidance-scale",), "how closely to follow the prompt; up to 1: no negative prompt"),
    Option("guidance_scale_2", ("--guidance-scale-2",), "the same for a second transformer; 0: as --guidance-scale"),
    Option("boundary", ("--boundary",), "share of the noise below which the second transformer takes over"),
    Option("flow_shift", ("--flow-shift",), "more for larger videos"),
    Option("seed", ("--seed",), "seed of the noise: the same one gives the same video"),
    Option("scheduler", ("--scheduler",), "the solver; a name that the model does not know gets a list of names"),
    Option("num_videos", ("--num-videos",), "videos from one prompt"),
    Option("fps", ("--fps",), "frames per second"),
    Option("reuse", ("--reuse",), "error up to which steps are reused, not computed: 0.12 halves 50 steps; 0: none"),
    Option("guidance_until", ("--guidance-until",), "share of the steps that are guided, from the first"),
    Option("sigmas", ("--sigmas",), "noise levels of the steps, before --flow-shift, for Euler: 1,0.75,0.5,0.25"),
    Option(
        "cfg_normalization",
        ("--cfg-normalization",),
        "most that guidance may make of a velocity's norm, in norms of the unguided one; 0: no limit; read by ",
        card_texts.normalizing_models,
    ),
    Option(
        "stg_scale",
        ("--stg-scale",),
        "how far to go from the model without the self-attention of a block; 0: that branch is saved; this and the "
        "following are read where --guidance-scale is over 1 by ",
        card_texts.sounding_models,
    ),
    Option("stg_block", ("--stg-block",), "the number of that block, from 0"),
    Option("modality_scale", ("--modality-scale",), "how closely video and sound follow each other; 1: saves a branch"),
    Option("guidance_rescale", ("--guidance-rescale",), "share of guidance's contrast that is taken back"),
    Option("audio_guidance_scale", ("--audio-guidance-scale",), "of the sound; 0: as --guidance-scale"),
    Option("audio_stg_scale", ("--audio-stg-scale",), "of the sound; 0: as --stg-scale"),
    Option("audio_modality_scale", ("--audio-modality-scale",), "of the sound; 0: as --modality-scale"),
    Option("audio_guidance_rescale", ("--audio-guidance-rescale",), "of the sound; 0: as --guidance-rescale"),
    Option(
        "context",
        ("--context",),
        f"how a video beyond the model's own length is made: {', '.join(get_args(Context))}; auto: by static windows, "
        f"or continued if it begins with an image, from {CONTEXT_WHOLE:g} times that length on",
    ),
    Option("context_frames", ("--context-frames",), "frames of a window or segment; 0: the model's own length"),
    Option(
        "context_overlap",
        ("--context-overlap",),
        "frames that windows share; -1: three eighths of a window; 1 or 5 that segments share, for ",
        card_texts.segment_models,
    ),
    Option(
        "context_weights", ("--context-weights",), f"blend windows by {', '.join(get_args(ContextWeights))} weights"
    ),
    Option("context_stride", ("--context-stride",), "for uniform and looped: N-1 more rounds of ever wider windows"),
    Option("context_noise", ("--context-noise",), f"{' or '.join(get_args(ContextNoise))}: the noise of windows"),
    Option(
        "context_keyframes",
        ("--context-keyframes",),
        "share of the steps, from the first, whose one window has frames of the whole video; for windows",
    ),
    Option(
        "tile",
        ("--tile",),
        "WIDTHxHEIGHT of tiles that the transformer looks at, where the result is larger, such as a second pass",
    ),
    Option("tile_overlap", ("--tile-overlap",), "part of a tile that it shares with its neighbour, 0 to 0.75"),
)

CONTEXT_SETTINGS = tuple(option.field for option in SETTINGS if option.field.startswith(("context", "tile")))
"""Of windows and tiles, which say what the transformer looks at at once."""

TEXT_SETTINGS = ("negative_prompt",)
"""Settings that are fixed once the text is encoded."""

_SAME_AS_FIELD = (
    *(
        "attention",
        "config",
        "dtype",
        "dump",
        "export",
        "fast",
        "frames",
        "from",
        "inputs",
        "json",
        "lora",
        "markdown",
        "mesh",
        "model",
        "output",
        "peers",
        "platform",
        "plot",
        "preset",
        "profile",
    ),
    *("quantize", "repeats", "size", "steps", "strength", "tpu", "transformer", "vae"),
)

FLAGS = {
    **{option.field: option.flags[0] for option in SETTINGS},
    **{name: f"--{name}" for name in _SAME_AS_FIELD},
    "checkpoint_every": "--checkpoint-every",
    "contact_sheet": "--contact-sheet",
    "vae_backend": "--vae-backend",
    "tiny_vae": "--tiny-vae",
    "preview": "--preview",
    "interpolate": "--interpolate",
    "interpolation_model": "--interpolation-model",
    **{name: f"--{name.replace('_', '-')}" for name in ("upscale", "upscale_by", "upscale_strength", "upscale_steps")},
    "text_encoder": "--text-encoder",
    "image_encoder": "--image-encoder",
    "ignore_config_key": "--ignore-config-key",
    "attention_window": "--attention-window",
    "attention_blocks": "--attention-blocks",
    "dense_max_tokens": "--dense-max-tokens",
    "prompt": "PROMPT",
    "image": "--image",
    "last_image": "--last-image",
    "reference": "--reference",
    **{name: f"--{name.replace('_', '-')}" for name in VIDEO_NAMES},
    "control_strength": "--control-strength",
    "comfyui_dir": "COMFYUI_DIR",
    "coordinator": "--coordinator",
    "num_processes": "--num-processes",
    "process_id": "--process-id",
    "hosts_timeout": "--hosts-timeout",
}
"""Flags by the names of the fields that errors mention."""


def path_parser(name: str, kind: Callable[[str], Any] = Path) -> Callable[[str], Any]:
    """A parser of the path argument `name`, which refuses an empty one: Path("") would be the current directory. And
    one that no file can have."""

    def parse(text: str) -> Any:
        if not text:
            # No InvalidValueError: argparse replaces the message of a ValueError.
            raise ComfyTpuError(f"{name} is empty; give a path", field=name)
        if half := find_half_character(text):
            raise ComfyTpuError(
                f"{name} {text!r} holds {half!r}, which is half a character; give another path", field=name
            )
        return kind(text)

    return parse


def add_prompt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="what the video should show; - reads it from standard input")


def add_images(parser: argparse.ArgumentParser, kind: Callable[[str], Any] = Path) -> None:
    """`kind`: str, where an image may also be an address, whose slashes a Path would change."""
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        type=path_parser("--image", kind),
        metavar="IMAGE",
        help="the first frame of a video, an image to start from, or a reference; as often as the model takes one",
    )
    parser.add_argument(
        "--last-image",
        type=path_parser("--last-image", kind),
        metavar="IMAGE",
        help="the last frame, for models that take one",
    )


def add_videos(parser: argparse.ArgumentParser, kind: Callable[[str], Any] = Path) -> None:
    """`kind`: as in `add_images`."""
    group = parser.add_argument_group(
        "videos and control",
        "A video file, a directory of numbered images, or an animation; a mask may be one image. It is read at --fps.",
    )
    for name in ("reference", *VIDEO_NAMES):
        flag = FLAGS[name]
        group.add_argument(
            flag,
            action="append",
            default=[],
            type=path_parser(flag, kind),
            metavar="IMAGE" if name == "reference" else "VIDEO",
            help=card_texts.references() if name == "reference" else card_texts.video_words(name),
        )
    group.add_argument(
        "--control-strength",
        metavar="X[,X…]",
        help=f"the effect of videos and references, from 0, or one for each layer of the control, for "
        f"{card_texts.models_with(lambda model: model.has_control_strength)} ({CONTROL_STRENGTH:g})",
    )


def read_media(arguments: argparse.Namespace) -> GivenMedia:
    """The given images and videos."""
    from comfy_tpu.jobs import opening

    return opening.read_media(vars(arguments))


def list_input_files(arguments: argparse.Namespace) -> list[Path]:
    """All input files on the command line."""
    single = [
        getattr(arguments, name, None) for name in ("last_image", "text", "latents", "tiny_vae", "interpolation_model")
    ]
    loras = [lora.path for lora in getattr(arguments, "lora", ())]
    names = ("image", "reference", *VIDEO_NAMES, "transformer", "text_encoder", "vae", "image_encoder")
    lists = [getattr(arguments, name, []) for name in names]
    return [*(path for paths in lists for path in paths), *loras, *(path for path in single if path is not None)]


def add_settings(
    parser: argparse.ArgumentParser, *, without: Collection[str] = (), from_input: str | None = None
) -> None:
    """`from_input`: the argument whose file holds the settings that are not given."""
    group = parser.add_argument_group(
        "settings",
        f"Those of {from_input} hold where none is given here."
        if from_input
        else f"Without a flag, or with an empty one, the model's own; those of {card_texts.default_model().name} are "
        "shown.",
    )
    group.add_argument(
        "--size", metavar="NAME", help=f"height, width and flow shift by name: {card_texts.size_names()}"
    )
    if "preset" not in without:
        group.add_argument(
            "--preset",
            metavar="NAME",
            help="settings that go together, for a model or a LoRA that was distilled for few steps: "
            f"{card_texts.preset_names()}; auto: as the LoRA or the model says; a flag beside it goes before its value",
        )
    for option in SETTINGS:
        if option.field not in without:
            _add_setting(group, option, with_default=from_input is None)
    if "fast" not in without:
        group.add_argument(
            "--fast",
            action="store_const",
            const=FAST,
            help=f"much faster, and not the same video: --reuse {FAST.reuse}, --guidance-until {FAST.guidance_until} "
            "and --quantize and --attention as the devices have it, where these are not given; what saves nothing is "
            "left out",
        )


def add_context(parser: argparse.ArgumentParser) -> None:
    """Adds the settings of windows and tiles to a command that takes no others."""
    for option in SETTINGS:
        if option.field in CONTEXT_SETTINGS:
            _add_setting(parser, option, with_default=True)


def add_fps(parser: argparse.ArgumentParser) -> None:
    """Adds --fps to a command whose input file holds the settings."""
    _add_setting(parser, next(option for option in SETTINGS if option.field == "fps"), with_default=False)


def add_model(parser: argparse.ArgumentParser, *, default: str | None) -> None:
    group = add_machine(parser, "model and machine")
    shown = default or "the one the input was made with, if it is on this machine"
    group.add_argument(
        "--model",
        help=f"a directory, a hub id, demo or demo-image (default: {shown}); with --transformer, the model that the "
        "files belong to (default: found by their shapes)",
    )
    for flag, count, what in _PART_FLAGS:
        group.add_argument(
            flag,
            action=_VaeAction if flag == "--vae" else "append",
            default=[],
            type=path_parser(flag),
            metavar="FILE",
            help=f"{what}, a single .safetensors file as in ComfyUI's models{count}",
        )
    parser.set_defaults(default_model=default)


_PART_FLAGS = (
    ("--transformer", "; twice for two transformers, high noise first", "the transformer"),
    ("--text-encoder", "; as often as the model has one", "a text encoder"),
    ("--vae", "; or tiny, which decodes by --tiny-vae", "the VAE"),
    ("--image-encoder", "", "the image encoder, for models that need one"),
)


class _VaeAction(argparse._AppendAction):
    """--vae FILE names a part of the model; --vae tiny is --vae-backend tiny."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if str(values) == TINY:
            namespace.vae_backend = TINY
        else:
            super().__call__(parser, namespace, values, option)


def chosen_model(arguments: argparse.Namespace) -> str | SingleFiles | None:
    """The model of the command line: a name, single files, or the command's default, which may be None."""
    from comfy_tpu.jobs import opening

    chosen = opening.choose_model(vars(arguments))
    return arguments.default_model if chosen is None else chosen


def add_loras(parser: argparse.ArgumentParser, kind: Callable[[str], Any] = parse_lora) -> None:
    parser.add_argument(
        "--lora",
        action="append",
        default=[],
        type=path_parser("--lora", kind),
        metavar="FILE[:STRENGTH][:high|low]",
        help="a LoRA for the transformer, a .safetensors file, with strength 1 if none is given; high or low: for one "
        "of two transformers; may be repeated",
    )


def add_machine(parser: argparse.ArgumentParser, title: str = "machine") -> argparse._ArgumentGroup:
    group = parser.add_argument_group(title)
    group.add_argument("--mesh", default="auto", help="auto, or sizes such as dp=2,tp=4")
    _add_platform(group)
    group.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32")
    group.add_argument(
        "--quantize",
        help="fp8 (H100 and newer, TPU v7x) or int8 (TPU v5e, v6e): faster, and not quite the same video; none: "
        "neither, also with --fast",
    )
    _add_cache_dir(group)
    add_ignored_keys(group)
    return group


def add_single_device(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `add_machine` that a network on one device has, in its own precision."""
    group = parser.add_argument_group("machine")
    _add_platform(group)
    _add_cache_dir(group)


def add_ignored_keys(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--ignore-config-key",
        action="append",
        default=[],
        metavar="NAME",
        help="leave out a key of the model's configurations that the installed libraries do not know; may be repeated",
    )


def _add_platform(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--platform", default="auto", help="auto, tpu, gpu or cpu")


def _add_cache_dir(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--cache-dir", type=path_parser("--cache-dir"), metavar="DIR", help="where compiled programs are kept"
    )


def add_vae_backend(parser: argparse.ArgumentParser) -> None:
    nnx = card_texts.models_with(lambda model: "nnx" in model.vae_backends)
    parser.add_argument(
        "--vae-backend",
        default=VAE_BACKEND,
        help=f"{', '.join(VAE_BACKENDS[:-1])} or {VAE_BACKENDS[-1]}: what runs the VAE; nnx for {nnx}; tiny decodes by "
        f"--tiny-vae ({VAE_BACKEND})",
    )
    add_tiny_vae(parser)


def add_tiny_vae(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tiny-vae",
        type=path_parser("--tiny-vae"),
        metavar="FILE",
        help="a tiny decoder, a .safetensors file of TAESD or TAEHV such as taew2_1.safetensors: for previews, and "
        "with --vae tiny for the result (default: the *tae*.safetensors of the model directory, with --vae tiny)",
    )


def add_debugging(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("debugging")
    group.add_argument("--verbose", action="store_true", help="also say how weights are split, and what is evicted")
    group.add_argument(
        "--profile", type=path_parser("--profile"), metavar="DIR", help="record the run for TensorBoard and Perfetto"
    )
    group.add_argument(
        "--dump", type=path_parser("--dump"), metavar="DIR", help="write the jaxpr, StableHLO and HLO of every program"
    )


def check_debugging(arguments: argparse.Namespace) -> None:
    """Raises InvalidValueError for a directory that cannot be written, before the model is opened."""
    from comfy_tpu.pipeline.atomic import check_directory

    for name in ("profile", "dump"):
        if (directory := getattr(arguments, name, None)) is not None:
            check_directory(directory, field=name)


def add_attention(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("attention", "The defaults suit most videos; a window changes the result.")
    defaults = AttentionConfig()
    group.add_argument(
        "--attention",
        default=defaults.implementation,
        metavar="NAME",
        help=f"the kernel: {', '.join(get_args(AttentionImplementation))}",
    )
    group.add_argument(
        "--attention-window",
        default="full",
        metavar="WINDOW",
        help="tokens that a video token attends to: full; video, the tiles around its own; other tiles such as "
        "4x16x16:3x3x3 (frames×rows×columns of a tile, and of the window in tiles); or tokens before and after, such "
        "as 2048,2048",
    )
    group.add_argument(
        "--attention-blocks",
        default="auto",
        metavar="Q,K,C",
        help="blocks of the splash kernel: rows of queries, of keys, and of keys computed at a time, such as "
        "2048,2048,1024",
    )
    group.add_argument(
        "--dense-max-tokens",
        default=defaults.dense_max_tokens,
        type=number_parser(int),
        metavar="N",
        help=f"the most keys for which all scores are held at once ({defaults.dense_max_tokens})",
    )


def add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the output's path")


def add_force(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="make the output even if it is there already")


def add_video_output(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "-o",
        "--output",
        type=path_parser("--output", str),
        metavar="PATH",
        help=f"x.mp4, x.gif, x.npy, x.png (one frame), a directory/ of PNG frames, or x-%%04d.png (default: {default})",
    )
    parser.add_argument(
        "--contact-sheet",
        type=path_parser("--contact-sheet"),
        metavar="PNG",
        help="also one image of every second frame",
    )


def add_interpolation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--interpolate",
        type=number_parser(int),
        metavar="N",
        help="N times as many frames per second, from 2 to 8, by --interpolation-model",
    )
    add_interpolation_model(parser, "--interpolation-model")


def add_interpolation_model(parser: argparse.ArgumentParser, flag: str) -> None:
    parser.add_argument(
        flag,
        dest="interpolation_model",
        type=path_parser(flag),
        metavar="FILE",
        help="the network that makes frames between frames: a .safetensors file of RIFE 4.25 or 4.26",
    )


def add_preview(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preview",
        type=path_parser("--preview"),
        metavar="PATH",
        help="write an image of the video after each step: x.png or x.jpg of its middle, x.gif or x.webp of all of it",
    )


def add_second_pass(parser: argparse.ArgumentParser) -> None:
    defaults = SecondPass(0.0)
    group = parser.add_argument_group(
        "second pass",
        f"A result of a larger size, from an upscaled smaller one, with every model but {card_texts.segment_models()}.",
    )
    add_upscale(group, "--upscale", "--upscale-by")
    group.add_argument(
        "--upscale-strength",
        type=number_parser(float),
        metavar="X",
        help=f"share of the steps that are run again, above 0 and up to 1 ({defaults.strength:g})",
    )
    group.add_argument(
        "--upscale-steps",
        type=number_parser(int),
        metavar="N",
        help="steps of which that share is run; 0: as many as --steps (0)",
    )


def add_upscale(parser: argparse._ActionsContainer, scale: str, by: str, *, required: bool = False) -> None:
    """`scale`, `by`: the flags."""
    parser.add_argument(
        scale,
        dest="upscale",
        type=number_parser(float),
        metavar="X",
        required=required,
        help="factor of both sides, over 1; 2 makes 832×480 of 416×240",
    )
    parser.add_argument(
        by,
        dest="upscale_by",
        metavar="NAME",
        help=f"{', '.join(get_args(UpscaleBy))}: resize latents, or decode, resize and encode ({SecondPass(0.0).by})",
    )


def add_strength(parser: argparse.ArgumentParser) -> None:
    of_images = card_texts.families_with(lambda model: model.starts_from_image)
    of_videos = card_texts.models_with(lambda model: model.starts_from_video)
    parser.add_argument(
        "--strength",
        type=number_parser(float),
        metavar="X",
        help=f"how much is redrawn, above 0 and up to 1, which is all: of --image, for {of_images} "
        f"({INIT_IMAGE_STRENGTH}); of --video, for {of_videos} ({INIT_VIDEO_STRENGTH})",
    )


def add_artifact_output(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "-o", "--output", type=path_parser("--output"), metavar="PATH", help=f"x.safetensors (default: {default})"
    )


def add_checkpoint(
    parser: argparse.ArgumentParser,
    help_: str = "save the steps every N steps, and on SIGTERM, beside the output; the same command goes on from there",
) -> None:
    parser.add_argument("--checkpoint-every", type=number_parser(int), metavar="N", help=help_)


def read_prompt(arguments: argparse.Namespace) -> str:
    from comfy_tpu.families.settings import check_prompt

    prompt: str = arguments.prompt
    with _utf8_errors("prompt"):
        if prompt == "-":
            prompt = first_host_value(_read_standard_input)
    check_texts(prompt, arguments.negative_prompt)
    check_prompt(prompt)
    return prompt


def _read_standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8").strip()
    except OSError as error:
        raise InvalidValueError(
            f"prompt cannot be read from standard input ({error}); give it as text", field="prompt"
        ) from error


def check_texts(prompt: str, negative_prompt: str | None) -> None:
    for field, text in (("prompt", prompt), ("negative_prompt", negative_prompt or "")):
        with _utf8_errors(field):
            text.encode("utf-8")  # Python keeps bytes of a command line that are not UTF-8 as lone surrogates


@contextlib.contextmanager
def _utf8_errors(field: str) -> Iterator[None]:
    try:
        yield
    except UnicodeError as error:
        raise InvalidValueError(f"{field} is not UTF-8 text ({error}); convert it", field=field) from error


def argument_names(parser: argparse.ArgumentParser) -> dict[str, str]:
    """The names of a command's arguments as the user writes them, with those of subcommands: `--output`, `MODEL`."""
    names: dict[str, str] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                names |= argument_names(subparser)
        elif flags := [flag for flag in action.option_strings if flag.startswith("--")]:
            names[action.dest.removesuffix("_")] = flags[0]  # from_, as Python has a word of that name
        elif action.metavar:
            names[action.dest] = str(action.metavar)
    return names


def find_flag(field: str | None, names: Mapping[str, str]) -> str | None:
    """The flag or argument name of a field. `names` are the command's own: `plan` has MODEL, other commands --model."""
    return None if field is None else names.get(field, FLAGS.get(field))


def _add_setting(parser: argparse._ActionsContainer, option: Option, *, with_default: bool) -> None:
    default = getattr(card_texts.default_model().defaults, option.field)
    shown = f" ({default})" if with_default and default != "" and option.field not in TEXT_SETTINGS else ""
    parser.add_argument(
        *option.flags,
        dest=option.field,
        type=_PARSERS[type(default)],
        metavar={int: "N", float: "X", str: "TEXT"}[type(default)],
        help=option.help + option.help_from_cards() + shown,
    )


def parse_names(text: str, known: tuple[Name, ...], flag: str) -> tuple[Name, ...]:
    """The names in a comma-separated list, in the order of `known`; raises InvalidValueError for an unknown one."""
    given = tuple(name.strip() for name in text.split(",") if name.strip())
    if unknown := [name for name in given if name not in known]:
        raise InvalidValueError(f"{flag} names {unknown[0]!r}; choose from {', '.join(known)}")
    if not given:
        raise InvalidValueError(f"{flag} is empty; choose from {', '.join(known)}")
    return tuple(name for name in known if name in given)


def number_parser(kind: type[int] | type[float]) -> Callable[[str], int | float | str]:
    """A parser of numbers. Other text is returned unchanged, for the common check of the settings to refuse."""

    def parse(text: str) -> int | float | str:
        try:
            return kind(text)
        except ValueError:
            return text

    return parse


_PARSERS: Mapping[type, Callable[[str], Any]] = {int: number_parser(int), float: number_parser(float), str: str}
