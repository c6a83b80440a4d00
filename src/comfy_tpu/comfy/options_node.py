"""TPU Options: how a model runs, for the nodes that run one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import folder_paths
from comfy_api.latest import io

from comfy_tpu.comfy.first_import import import_jax
from comfy_tpu.comfy.inputs import OPTIONS_TYPE, check_integers
from comfy_tpu.config import (
    ATTENTION_WINDOWS,
    CONTEXT_WHOLE,
    FAST,
    VAE_BACKENDS,
    AttentionConfig,
    AttentionImplementation,
    Context,
    ContextNoise,
    ContextWeights,
    GenerationSettings,
    Quantization,
    RunOptions,
    RuntimeConfig,
)
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.presets import AUTO
from comfy_tpu.families.registry import model_cards
from comfy_tpu.families.tiles import OVERLAP_MAX
from comfy_tpu.hub.download import ALLOWED_BYTES
from comfy_tpu.hub.sizes import format_bytes

NO_PRESET = NO_FILE = "none"
_TINY_FOLDER = "vae_approx"
_SUFFIXES = (".safetensors", ".sft")
DTYPES = ["auto", "bfloat16", "float32"]
_ATTENTION, _RUNTIME, _SETTINGS = AttentionConfig(), RuntimeConfig(), GenerationSettings()


class TPUOptions(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TPUOptions",
            display_name="TPU Options",
            category="TPU",
            description="How a model runs: chips, precision, attention, and ways to save time. For the options input "
            "of any node of this pack that runs a model.",
            inputs=[
                *_runtime_inputs(),
                *_attention_inputs(),
                _fast_input(),
                *_context_inputs(),
                _preset_input(),
                _tiny_vae_input(),
                _keyframes_input(),
                *_tile_inputs(),
                _cpu_fallback_input(),
                _download_input(),
                _ignored_keys_input(),
            ],
            outputs=[OPTIONS_TYPE.Output("options", tooltip="For the options input; the same for all nodes of a run.")],
        )

    @classmethod
    def execute(cls, **chosen: Any) -> io.NodeOutput:
        import_jax()
        return io.NodeOutput(make_options(**chosen))


def make_options(
    *,
    mesh: str,
    dtype: str,
    quantize: Quantization,
    vae_backend: Any,
    reuse: float,
    guidance_until: float,
    num_videos: int,
    attention: AttentionImplementation,
    attention_window: str,
    attention_blocks: str,
    dense_max_tokens: int,
    fast: bool = False,
    preset: str = NO_PRESET,
    tiny_vae: str = NO_FILE,
    tile: str = _SETTINGS.tile,
    cpu_fallback: bool = False,
    allow_download: bool = False,
    ignore_config_keys: str = "",
    **parts: Any,
) -> RunOptions:
    """The options of the node's inputs; raises InvalidValueError or MeshError with the input as its field.

    With `fast`, an input at its default counts as not chosen: a widget always has a value. So do those of `parts`.
    """
    from comfy_tpu.kernels.windows import parse_blocks, parse_window
    from comfy_tpu.parallel.mesh import check_mesh_text
    from comfy_tpu.pipeline.runtime_checks import check_attention

    check_mesh_text(mesh)
    parts |= {"tile": tile.strip()}
    counts = {name: value for name, value in parts.items() if isinstance(getattr(_SETTINGS, name), int)}
    check_integers(num_videos=num_videos, dense_max_tokens=dense_max_tokens, **counts)
    config = AttentionConfig(
        implementation=attention,
        block_sizes=parse_blocks(attention_blocks),
        dense_max_tokens=dense_max_tokens,
        window=parse_window(attention_window),
    )
    check_attention(config)
    runtime = RuntimeConfig(
        mesh=mesh.strip(),
        dtype=dtype,
        quantize=None if quantize == "none" else quantize,
        fast=FAST if fast else None,
        vae_backend=vae_backend,
        tiny_vae=None if tiny_vae == NO_FILE else _find_tiny_vae(tiny_vae),
        attention=config,
        ignored_config_keys=tuple(filter(None, (key.strip() for key in ignore_config_keys.split(",")))),
    )
    return RunOptions(
        runtime,
        reuse=None if fast and reuse == _SETTINGS.reuse else reuse,
        guidance_until=None if fast and guidance_until == _SETTINGS.guidance_until else guidance_until,
        num_videos=num_videos,
        preset=None if preset == NO_PRESET else preset,
        cpu_fallback=cpu_fallback,
        allow_download=allow_download,
        **{name: None if value == getattr(_SETTINGS, name) else value for name, value in parts.items()},
    )


def _runtime_inputs() -> list[io.Input]:
    return [
        io.String.Input(
            "mesh",
            default=str(_RUNTIME.mesh),
            tooltip="How the work is split over the chips: auto chooses; single uses one; seed is dp=2,tp=4; or sizes "
            "such as dp=2,sp=4 (dp: videos and guidance, sp: tokens, tp: heads).",
        ),
        io.Combo.Input(
            "dtype",
            options=DTYPES,
            default=_RUNTIME.dtype,
            tooltip="What is computed in. auto: bfloat16 on TPU and GPU, float32 on a CPU.",
        ),
        io.Combo.Input(
            "quantize",
            options=list(get_args(Quantization)),
            default="none",
            tooltip="Large matrix products of the transformer in 8 bits: fp8 on H100 and newer and TPU v7x, int8 on "
            "TPU v5e and v6e. Faster, and not quite the same result.",
        ),
        io.Combo.Input(
            "vae_backend",
            options=list(VAE_BACKENDS),
            default=_RUNTIME.vae_backend,
            tooltip="What runs the VAE: the PyTorch module through torchax, or nnx, its version in Flax, for models "
            "that have one. tiny decodes by tiny_vae: faster, with fewer details.",
        ),
        io.Float.Input(
            "reuse",
            default=_SETTINGS.reuse,
            min=0.0,
            max=1.0,
            step=0.01,
            tooltip="Error up to which a step reuses the one before instead of being computed. 0: every step is "
            "computed; 0.12 halves 50 steps.",
        ),
        io.Float.Input(
            "guidance_until",
            default=_SETTINGS.guidance_until,
            min=0.0,
            max=1.0,
            step=0.05,
            tooltip="Share of the steps, from the first, that are guided. The others run the prompt alone, in half the "
            "time where one chip runs both.",
        ),
        io.Int.Input(
            "num_videos",
            default=_SETTINGS.num_videos,
            min=1,
            max=16,
            tooltip="Videos or images from one prompt. Latents have this batch; frames of all videos follow one "
            "another.",
        ),
    ]


def _fast_input() -> io.Input:
    """Optional, because workflows that were saved as API prompts have no value for it, and the last for those that hold
    the values of widgets in their order."""
    return io.Boolean.Input(
        "fast",
        default=False,
        optional=True,
        tooltip=f"Much faster, and not the same result: reuse {FAST.reuse}, guidance_until {FAST.guidance_until} and "
        "quantize and attention as the chips have it, each where its input is at its default. What saves nothing is "
        "left out, and the log says why.",
    )


def _context_inputs() -> list[io.Input]:
    """Optional and behind the others, for the same reasons."""
    return [
        io.Combo.Input(
            "context",
            options=list(get_args(Context)),
            default=_SETTINGS.context,
            optional=True,
            tooltip="How a video longer than the model's own length is made. static, uniform, looped: by overlapping "
            "windows, blended at every step. continue: segment after segment, from an image. none: whole. auto: static "
            f"windows, or continued from an image, beyond {CONTEXT_WHOLE:g} times that length.",
        ),
        io.Int.Input(
            "context_frames",
            default=_SETTINGS.context_frames,
            min=0,
            max=1025,
            optional=True,
            tooltip="Frames of a window, or of a segment. 0: the model's own length.",
        ),
        io.Int.Input(
            "context_overlap",
            default=_SETTINGS.context_overlap,
            min=-1,
            max=1024,
            optional=True,
            tooltip="Frames that neighbouring windows share. More blends better and takes longer. -1: three eighths of "
            "a window.",
        ),
        io.Combo.Input(
            "context_weights",
            options=list(get_args(ContextWeights)),
            default=_SETTINGS.context_weights,
            optional=True,
            tooltip="How windows are blended: most in their middle (pyramid), all alike (flat), or by a ramp over the "
            "overlap.",
        ),
        io.Int.Input(
            "context_stride",
            default=_SETTINGS.context_stride,
            min=1,
            max=16,
            optional=True,
            tooltip="For uniform and looped: 2 adds windows of every second frame, 3 of every fourth, and so on.",
        ),
        io.Combo.Input(
            "context_noise",
            options=list(get_args(ContextNoise)),
            default=_SETTINGS.context_noise,
            optional=True,
            tooltip="freenoise: all windows start from the noise of the first one, shuffled, so that they differ less.",
        ),
    ]


def _preset_input() -> io.Input:
    """Optional and the last, for the same reasons."""
    names = dict.fromkeys(name for model in model_cards() for name in model.presets)
    return io.Combo.Input(
        "preset",
        options=[NO_PRESET, AUTO, *names],
        default=NO_PRESET,
        optional=True,
        tooltip="Steps, guidance, scheduler and shift that go together, in place of the node's own, for a model or a "
        "LoRA that was distilled for few steps. auto: as the LoRA or the model says.",
    )


def _tiny_vae_input() -> io.Input:
    """Optional and the last, for the same reasons."""
    files = [name for name in folder_paths.get_filename_list(_TINY_FOLDER) if name.endswith(_SUFFIXES)]
    return io.Combo.Input(
        "tiny_vae",
        options=[NO_FILE, *files],
        default=NO_FILE,
        optional=True,
        tooltip="A tiny decoder for previews, and with vae_backend tiny for the result: a safetensors file of TAESD or "
        "TAEHV that was made for the model's VAE, in ComfyUI's models/vae_approx.",
    )


def _keyframes_input() -> io.Input:
    """Optional and the last, for the same reasons."""
    return io.Float.Input(
        "context_keyframes",
        default=_SETTINGS.context_keyframes,
        min=0.0,
        max=1.0,
        step=0.05,
        optional=True,
        tooltip="The share of the steps, from the first, that compute one window of frames from the whole video, so "
        "that colours and places agree; those between follow their neighbours. For windows. 0: none.",
    )


def _tile_inputs() -> list[io.Input]:
    """Optional and the last, for the same reasons."""
    return [
        io.String.Input(
            "tile",
            default=_SETTINGS.tile,
            optional=True,
            tooltip="Width and height of tiles, such as 832x480, that the transformer looks at one by one where "
            "the result is larger; blended at every step. For a second sampler at a larger size. Empty: all at once.",
        ),
        io.Float.Input(
            "tile_overlap",
            default=_SETTINGS.tile_overlap,
            min=0.0,
            max=OVERLAP_MAX,
            step=0.05,
            optional=True,
            tooltip="Part of a tile that it shares with its neighbour, at least. More blends better and takes longer.",
        ),
    ]


def _cpu_fallback_input() -> io.Input:
    """Optional and the last, for the same reasons."""
    return io.Boolean.Input(
        "cpu_fallback",
        default=False,
        optional=True,
        tooltip="For the TPU Compile nodes: whether a model of over 1 billion parameters that cannot run on the TPU "
        "runs on the CPU, which takes hours. Off: it stops with the reason.",
    )


def _download_input() -> io.Input:
    """Optional and the last, for the same reasons."""
    return io.Boolean.Input(
        "allow_download",
        default=False,
        optional=True,
        tooltip=f"Download models of any size. Off: a node stops before a download of more than "
        f"{format_bytes(ALLOWED_BYTES)}, and names its size and licence.",
    )


def _ignored_keys_input() -> io.Input:
    """Optional and the last, for the same reasons."""
    return io.String.Input(
        "ignore_config_keys",
        default="",
        optional=True,
        tooltip="Keys of the model's configurations to leave out, separated by commas, where a node stopped because "
        "the installed libraries do not know them. The result may be wrong.",
    )


def _find_tiny_vae(name: str) -> Path:
    found = folder_paths.get_full_path(_TINY_FOLDER, name)
    if found is None:
        raise InvalidValueError(
            f"tiny_vae={name} is not in ComfyUI's models/vae_approx; choose another, or put it there", field="tiny_vae"
        )
    return Path(found)


def _attention_inputs() -> list[io.Input]:
    return [
        io.Combo.Input(
            "attention",
            options=list(get_args(AttentionImplementation)),
            default=_ATTENTION.implementation,
            tooltip="The attention kernel. auto: splash on TPU for long sequences, hopper or cuDNN on GPU, chunked "
            "otherwise.",
        ),
        io.String.Input(
            "attention_window",
            default=next(iter(ATTENTION_WINDOWS)),
            tooltip="What a video token attends to: full; video, the tiles around its own; other tiles such as "
            "4x16x16:3x3x3 (frames×rows×columns of a tile, and of the window in tiles); or tokens before and after, "
            "such as 2048,2048. Faster for long videos, and not the same video.",
        ),
        io.String.Input(
            "attention_blocks",
            default="auto",
            tooltip="Blocks of the splash kernel: rows of queries, of keys, and of keys computed at a time, multiples "
            "of 128 such as 2048,2048,1024. auto: by chip and length.",
        ),
        io.Int.Input(
            "dense_max_tokens",
            default=_ATTENTION.dense_max_tokens,
            min=1,
            max=65536,
            tooltip="The most keys for which all scores are held at once; a longer attention runs in blocks.",
        ),
    ]
