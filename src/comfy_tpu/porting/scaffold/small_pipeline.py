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
from comfy_tpu.porting.small_models import always, at_most, config_kind, shrink_config
from comfy_tpu.porting.targets import describe_error
from comfy_tpu.quiet import quiet

WORDS = ("a", "A", "red", "RED", "blue", "circle", "and", "moving", "left", "right", "on", "black", "background")
WIDTH = 32
"""Features of a text encoder."""
TOKENS = 12
"""The length of a text, where a model is made for one."""
_GAIN = 2.0
"""A factor on the matrices of a transformer. As they are initialized, a small AuraFlow hardly reads its prompt: another
one changes the image by 92 dB, which no comparison sees; with this factor by 33 dB (PixArt-Sigma 19, CogVideoX 17)."""
CHANNELS = 4
_TRANSFORMER_SIZES = {
    "layers": at_most(2),
    "heads": always(4),  # tp=4 divides them
    "head_dim": always(16),
    "hidden": always(64),
    "text_width": always(WIDTH),
    "sample": always(8),
    "feed_forward": always(2 * WIDTH),
    "max_text_seq_length": always(TOKENS),
    "time_embed_dim": always(2 * WIDTH),
    "sample_frames": always(9),
}
_VAE_SIZES = {"block_channels": always(8), "repeats": always(1), "norm_num_groups": always(2)}


@functools.cache
def _small_parts() -> Mapping[str, Mapping[str, Any]]:
    """Configurations by class: of text encoders, and of VAEs whose sizes do not follow from names and defaults."""
    table: Mapping[str, Mapping[str, Any]] = read_json(Path(__file__).with_name("small_parts.json"))
    return table


def shrink_configs(source: Source) -> dict[str, dict[str, Any]]:
    """The configuration of every small part: only what differs from the class's defaults."""
    configs: dict[str, dict[str, Any]] = {}
    for encoder in source.encoders:
        configs[encoder] = dict(_small_parts()[source.parts[encoder].__name__])
    configs["vae"] = _shrink_vae(source)
    configs["transformer"] = _shrink_transformer(source)
    configs["scheduler"] = dict(source.configs.get("scheduler", {}))
    return configs


def _shrink_vae(source: Source) -> dict[str, Any]:
    given, full = source.configs.get("vae", {}), source.full_config("vae")
    known = _small_parts().get(source.parts["vae"].__name__)
    small = shrink_config(full, _VAE_SIZES) if known is None else dict(known)
    if "latent_channels" in full:
        small = {"latent_channels": CHANNELS, **small}
    for key in ("latents_mean", "latents_std"):
        if given.get(key):
            small[key] = list(given[key])[:CHANNELS]
    return {**given, **small}


def _shrink_transformer(source: Source) -> dict[str, Any]:
    given, full = source.configs.get("transformer", {}), source.full_config("transformer")
    defaults = inspect.signature(source.parts["transformer"]).parameters
    switches = {key: value for key, value in full.items() if isinstance(value, bool) and value != defaults[key].default}
    small = shrink_config(full, _TRANSFORMER_SIZES)
    latents, channels = source.full_config("vae").get("latent_channels"), full.get("in_channels")
    packed = 4 if channels and latents and channels == 4 * latents else 1
    for key, value in full.items():
        if config_kind(key) == "channels" and value:
            small[key] = CHANNELS * packed * (value // channels if key == "out_channels" else 1)
        elif config_kind(key) == "rope_axes" and value:
            small[key] = (4, 6, 6)[: len(value)]
    return {**given, **switches, **small}


def build_pipeline(
    pipeline: str, classes: Mapping[str, str], configs: Mapping[str, Mapping[str, Any]], seed: int = 0
) -> Any:
    """A pipeline with random weights that bfloat16 holds exactly. `classes` of the parts, by the name of the folder."""
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
            parts[name] = randomize_weights(cls(cls.config_class(**config)))
        elif name == "scheduler":
            parts[name] = getattr(diffusers, class_name)(**config)
        else:
            gain = _GAIN if name == "transformer" else 1.0
            parts[name] = randomize_weights(getattr(diffusers, class_name)(**config), gain)
    with quiet():
        made: Any = getattr(diffusers, pipeline)
        accepted = inspect.signature(made).parameters
        absent = {name: None for name in getattr(made, "_optional_components", ()) if name in accepted}
        built: Any = made(**{**absent, **parts})
    built.set_progress_bar_config(disable=True)
    return built


def build_small_pipeline(source: Source, configs: Mapping[str, Mapping[str, Any]]) -> Any:
    try:
        return build_pipeline(source.name, source.class_names, configs)
    except Exception as error:
        raise UnsupportedError(
            f"no small {source.name} could be made ({describe_error(error)}); {explain_sizes(source)}"
        ) from error


def explain_sizes(source: Source) -> str:
    by_hand = f"write the family by hand, {GUIDE} says how"
    if source.directory is not None:
        return f"sizes that belong together do not follow from the names in its config.json files: {by_hand}"
    return (
        f"its sizes do not follow from names and defaults: give a model directory, whose files may tell, or {by_hand}"
    )


def randomize_weights(module: torch.nn.Module, gain: float = 1.0) -> torch.nn.Module:
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
