"""A small random pipeline of any class: sizes that belong together, weights that do something, a few words."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from comfy_tpu.errors import GUIDE, UnsupportedError
from comfy_tpu.json_input import read_json
from comfy_tpu.porting.scaffold.pipelines import Source
from comfy_tpu.porting.small_models import config_kind
from comfy_tpu.quiet import quiet

WORDS = ("a", "A", "red", "RED", "blue", "circle", "and", "moving", "left", "right", "on", "black", "background")
WIDTH = 32
"""Of text."""
TOKENS = 12
"""Of text, where a model is made for a number of them."""
_GAIN = 2.0
"""On the matrices of a transformer. As they are initialized, a small AuraFlow hardly reads its prompt: another one
changes the image by 92 dB, which no comparison sees; with this by 33 dB (PixArt-Sigma 19, CogVideoX 17)."""
HEADS, HEAD_DIM, LAYERS, CHANNELS = 4, 16, 2, 4

_SMALL_SIZES = {
    "heads": HEADS,
    "head_dim": HEAD_DIM,
    "text_width": WIDTH,
    "sample": 8,
    "feed_forward": 2 * WIDTH,
    "max_text_seq_length": TOKENS,
    "time_embed_dim": 2 * WIDTH,
    "sample_frames": 9,
}
"""Sizes of a small transformer, by what a key counts or by the key."""


@functools.cache
def _small_parts() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """Configurations by class: of text encoders, and of VAEs whose sizes do not follow from names and defaults."""
    table: Mapping[str, Mapping[str, Mapping[str, Any]]] = read_json(Path(__file__).with_name("small_parts.json"))
    return table


def small_configs(source: Source) -> dict[str, dict[str, Any]]:
    """Of every part with a configuration: only what differs from the class's defaults."""
    configs: dict[str, dict[str, Any]] = {}
    for encoder in source.encoders:
        configs[encoder] = dict(_small_parts()["text_encoders"][source.parts[encoder].__name__])
    configs["vae"] = _small_vae(source)
    configs["transformer"] = _small_transformer(source)
    configs["scheduler"] = dict(source.configs.get("scheduler", {}))
    return configs


def _small_vae(source: Source) -> dict[str, Any]:
    given, full = dict(source.configs.get("vae", {})), source.full_config("vae")
    name = source.parts["vae"].__name__
    small: dict[str, Any] = {"latent_channels": CHANNELS} if "latent_channels" in full else {}
    known = _small_parts()["vaes"]
    small |= known.get(name, {})
    if name not in known:
        for key, value in full.items():
            if key.endswith("block_out_channels") and isinstance(value, (tuple, list)):
                small[key] = tuple(8 for _ in value)
            elif key == "layers_per_block" and isinstance(value, int):
                small[key] = 1
            elif key == "norm_num_groups":
                small[key] = 2
    statistics = {key: value for key, value in given.items() if key in ("latents_mean", "latents_std") and value}
    return {**given, **small, **{key: list(value)[:CHANNELS] for key, value in statistics.items()}}


def _small_transformer(source: Source) -> dict[str, Any]:
    given, full = dict(source.configs.get("transformer", {})), source.full_config("transformer")
    counts = {config_kind(key): value for key, value in reversed(full.items()) if isinstance(value, int)}
    heads, head_dim = counts.get("heads"), counts.get("head_dim")
    hidden = heads * head_dim if heads and head_dim else None
    latent = source.full_config("vae").get("latent_channels")
    packed = 4 if full.get("in_channels") and latent and full["in_channels"] == 4 * latent else 1
    small: dict[str, Any] = {}
    defaults = {key: each.default for key, each in inspect.signature(source.parts["transformer"]).parameters.items()}
    given |= {key: value for key, value in full.items() if isinstance(value, bool) and value != defaults[key]}
    for key, value in full.items():
        if isinstance(value, bool) or value is None:
            continue
        kind = config_kind(key)
        if kind == "rope_axes" and isinstance(value, (tuple, list)):
            small[key] = (4, 6, 6)[: len(value)]
        elif not isinstance(value, int):
            continue
        elif kind == "layers":
            small[key] = min(value, LAYERS)
        elif kind not in ("heads", "head_dim") and hidden is not None and value == hidden:
            small[key] = HEADS * HEAD_DIM
        elif kind == "channels":
            small[key] = CHANNELS * packed * (value // full["in_channels"] if key == "out_channels" else 1)
        elif kind in _SMALL_SIZES or key in _SMALL_SIZES:
            small[key] = _SMALL_SIZES.get(key) or _SMALL_SIZES[kind]
    return {**given, **small}


def build_pipeline(
    pipeline: str, classes: Mapping[str, str], configs: Mapping[str, Mapping[str, Any]], seed: int = 0
) -> Any:
    """With random weights that bfloat16 holds exactly. `classes`: of every part, by the name of its folder."""
    with quiet():
        import diffusers
        import transformers

    torch.manual_seed(seed)
    parts: dict[str, Any] = {}
    for name, class_name in classes.items():
        config = dict(configs.get(name, {}))
        if name.startswith("tokenizer"):
            encoder = classes[name.replace("tokenizer", "text_encoder")]
            parts[name] = _clip_tokenizer() if encoder.startswith("CLIP") else _t5_tokenizer()
        elif name.startswith("text_encoder"):
            cls: Any = getattr(transformers, class_name)
            parts[name] = random_weights(cls(cls.config_class(**config)))
        elif name == "scheduler":
            parts[name] = getattr(diffusers, class_name)(**config)
        else:
            gain = _GAIN if name == "transformer" else 1.0
            parts[name] = random_weights(getattr(diffusers, class_name)(**config), gain)
    with quiet():
        made: Any = getattr(diffusers, pipeline)
        accepted = inspect.signature(made).parameters
        absent = {name: None for name in getattr(made, "_optional_components", ()) if name in accepted}
        built: Any = made(**{**absent, **parts})
    built.set_progress_bar_config(disable=True)
    return built


def small_pipeline(source: Source, configs: Mapping[str, Mapping[str, Any]]) -> Any:
    try:
        return build_pipeline(source.name, class_names(source), configs)
    except Exception as error:
        raise UnsupportedError(
            f"no small {source.name} could be made ({type(error).__name__}: {first_line(error)}); {no_sizes(source)}"
        ) from error


def no_sizes(source: Source) -> str:
    by_hand = f"write the family by hand, {GUIDE} says how"
    if source.directory is not None:
        return f"sizes that belong together do not follow from the names in its config.json files: {by_hand}"
    return (
        f"its sizes do not follow from names and defaults: give a model directory, whose files may tell, or {by_hand}"
    )


def first_line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0]


def class_names(source: Source) -> dict[str, str]:
    return {name: cls.__name__ for name, cls in source.parts.items()}


def random_weights(module: torch.nn.Module, gain: float = 1.0) -> torch.nn.Module:
    module.eval().requires_grad_(False)
    for parameter in module.parameters():
        if parameter.ndim > 1:
            parameter.mul_(gain)
        if parameter.ndim == 1 or not parameter.any():
            parameter.add_(0.1 * torch.randn_like(parameter))  # biases and norms that do something
        parameter.copy_(parameter.bfloat16())
    return module


def _tokenizer(vocabulary: list[str], template: str, length: int, **special: str) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    numbers = {word: index for index, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    used = [(word, numbers[word]) for word in template.split() if word != "$A"]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=used)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", model_max_length=length, **special)


def _clip_tokenizer() -> Any:
    words = ["<start>", "<unk>", *WORDS, "<more>", "<end>"]
    return _tokenizer(words, "<start> $A <end>", 77, bos_token="<start>", eos_token="<end>", pad_token="<end>")


def _t5_tokenizer() -> Any:
    return _tokenizer(["<pad>", "</s>", "<unk>", *WORDS], "$A </s>", 512, eos_token="</s>", pad_token="<pad>")


def spatial_scale(vae: Any) -> int:
    """Pixels a latent has on a side, if every block of the VAE but one halves it, as is usual; 8 if it lists no blocks.

    Whoever runs the pipeline sees by the shape of its latents whether that holds.
    """
    blocks = vae.config.get("block_out_channels") or vae.config.get("decoder_block_out_channels")
    return int(2 ** (len(blocks) - 1)) if blocks else 8
