"""The modules of a new family and of its parity test, from their templates."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import NodeSet
from comfy_tpu.porting.scaffold.facts import Facts
from comfy_tpu.porting.scaffold.hypotheses import LAYOUTS, STATISTICS
from comfy_tpu.porting.scaffold.learner import Embedding
from comfy_tpu.porting.scaffold.pipelines import ENCODERS
from comfy_tpu.porting.scaffold.renderer import MARK, render, render_module
from comfy_tpu.porting.scaffold.small_pipeline import TOKENS

_IMAGE = "[batch, channels, 1, height, width] of the transformer's latents -> the image, without a cache."
_VIDEO = "[batch, channels, frames, height, width] of the transformer's latents -> all frames at once, without a cache."
_TEXT_WIDTHS = (
    *("caption_channels", "text_embed_dim", "joint_attention_dim", "cap_feat_dim", "text_dim", "context_dim"),
    *("cross_attention_input_dim", "cross_attention_dim"),
)
"""Keys of configurations for the width of a text's embeddings."""


def render_family(facts: Facts) -> dict[str, str]:
    """The modules of the family's package, by their file names."""
    common = common_values(facts)
    values = {
        "card.py": _card_values(facts),
        "model.py": _model_values(facts),
        "text.py": _text_values(facts),
        "transformer.py": _transformer_values(facts),
        "vae.py": _vae_values(facts),
    }
    files = {name: render_module(name, **common, **own) for name, own in values.items()}
    return {"__init__.py": render("family_init.py", **common), **files}


def common_values(facts: Facts) -> dict[str, object]:
    """Values that several templates have, the defaults of the settings among them."""
    return {
        **dataclasses.asdict(facts.defaults),
        "name": facts.name,
        "package": facts.package,
        "title": facts.title,
        "pipeline": facts.source.name,
        "model_id": facts.model_id,
        "noun": facts.noun,
        "mark": MARK,
    }


def render_parity_case(facts: Facts) -> str:
    """The test configuration: a small pipeline, and the smallest settings that no axis of a mesh divides."""
    parameters = inspect.signature(facts.source.pipeline.__call__).parameters
    settings: dict[str, Any] = {"height": 3 * facts.size_multiple, "width": 5 * facts.size_multiple}
    if not facts.calls.makes_images:
        multiple, frames = facts.calls.frames_multiple, 2 * facts.calls.temporal_scale + 1
        settings["num_frames"] = frames if (frames - 1) % multiple == 0 else multiple + 1
    settings |= {"num_inference_steps": 3, "guidance_scale": 4.0}
    if "max_sequence_length" in parameters:
        settings["max_sequence_length"] = TOKENS
    return render_module(
        "parity_case.py",
        **common_values(facts),
        classes=facts.source.class_names,
        configs={name: dict(config) for name, config in facts.configs.items() if config},
        settings=settings,
        layout=facts.calls.layout.name,
        pipeline_options={name: False for name in ("clean_caption", "use_resolution_binning") if name in parameters},
    )


def _card_values(facts: Facts) -> dict[str, object]:
    source, defaults = facts.source, facts.defaults
    height, width, tokens = defaults.height, defaults.width, defaults.max_sequence_length
    encoders = dict.fromkeys(ENCODERS[source.parts[each].__name__].upper() for each in source.encoders)
    scheduler, *others = facts.schedulers
    published = "The configuration of the published model."
    assumed = "diffusers' defaults, which the published model's config.json may replace."
    return {
        "transformer_config": source.full_config("transformer"),
        "transformer_source": published if source.directory is not None else assumed,
        "size_multiple": facts.size_multiple,
        "frames_multiple": facts.calls.frames_multiple,
        "frames_max": 1 if facts.calls.makes_images else 1025,
        "schedulers": facts.schedulers,
        "tokens_max": f"tokens_max={tokens}," if tokens > 512 else "",
        "defaults": _defaults_expression(facts.defaults),
        "sizes": {f"{width}×{height}": {"height": height, "width": width}},
        "spatial_scale": facts.calls.spatial_scale,
        "temporal_scale": facts.calls.temporal_scale,
        "conditioning_keys": _conditioning_keys(facts),
        "node_options": _node_options(facts),
        "encoders": f"{' and '.join(encoders)} encoder{'s' if len(source.encoders) > 1 else ''}",
        "scheduler_words": f"{scheduler} is {facts.title}'s own"
        + (f"; {' and '.join(others)} are multistep ones" if others else ""),
        "words": "" if facts.calls.makes_images else _video_words(facts),
    }


def _defaults_expression(defaults: GenerationSettings) -> str:
    """The defaults in Python, without those that every family has."""
    chosen = {field.name: getattr(defaults, field.name) for field in dataclasses.fields(defaults)}
    own = {name: value for name, value in chosen.items() if value != getattr(GenerationSettings, name)}
    return f"GenerationSettings({', '.join(f'{name}={value!r}' for name, value in own.items())})"


def _conditioning_keys(facts: Facts) -> dict[str, str]:
    """The keys in a CONDITIONING of all embeddings but "text"."""
    names = [each.name for each in facts.calls.embeddings if each.name != "text"]
    return {name: "pooled_output" if name == "pooled" else f"tpu_{name}" for name in names}


def _node_options(facts: Facts) -> str:
    lines = [
        f"size_max={max(2048 if facts.calls.makes_images else 1280, facts.defaults.height, facts.defaults.width)},"
    ]
    if facts.defaults.num_frames > NodeSet.frames_max:
        lines.append(f"frames_max={facts.defaults.num_frames},")
    return "\n".join(lines)


def _video_words(facts: Facts) -> str:
    frames, fps = facts.defaults.num_frames, facts.defaults.fps
    shift = "a factor on the model's own" if facts.calls.scheduler else "this model's scheduler does not use it"
    return "\n".join(
        (
            f'frames="{frames} frames at {fps} frames a second are {frames / fps:.0f} seconds.",',
            f'flow_shift="{shift}",',
            f'trained_fps="{fps}",',
        )
    )


def _model_values(facts: Facts) -> dict[str, object]:
    return {
        "schedulers": _schedulers(facts),
        "own_settings": _own_settings(facts),
        "vae_options": "" if facts.calls.makes_images else "decodes_all_frames=True,",
    }


def _transformer_values(facts: Facts) -> dict[str, object]:
    cls, proposal = facts.source.parts["transformer"], facts.proposal
    config = facts.source.full_config("transformer")
    keep = getattr(cls, "_keep_in_fp32_modules", None) or ()
    stacks = ""
    for stack in proposal.stacks:
        carry = "" if stack.carry == ("hidden_states",) else f", carry={_tuple(stack.carry)}"
        stacks += f'LayerStack("{stack.path}"{carry}),\n'
    return {
        "transformer": cls.__name__,
        "heads": f'heads="{proposal.heads}",' if proposal.heads else "",
        "switches": {key: value for key, value in config.items() if isinstance(value, bool)},
        "stacks": f"stacks=(\n{stacks}),\n" if stacks else "",
        "float32": f"float32={_tuple(tuple(f'*{each}*' for each in keep))}," if keep else "",
        "rules": "\n".join(_rules(facts)),
        "embedding_arguments": ", ".join(f"{each.name}: torch.Tensor" for each in facts.calls.embeddings),
        "embedding_entries": ", ".join(f'"{each.name}": {each.name}' for each in facts.calls.embeddings),
        **_predict_values(facts),
    }


def _rules(facts: Facts) -> Iterator[str]:
    group = None
    for rule in facts.proposal.rules:
        head = rule.pattern.partition(".")[0]
        if head != group:
            same = [each for each in facts.proposal.rules if each.pattern.partition(".")[0] == head]
            size = sum(facts.proposal.nbytes[each.pattern] for each in same)
            split = sum(facts.proposal.nbytes[each.pattern] for each in same if each.kind != "replicate")
            if size >= 2**27:
                yield f"# {size / 2**30:.2f} GiB at the published size, {split / 2**30:.2f} of them in pieces"
            group = head
        yield f'{rule.kind}("{rule.pattern}"),'


def _vae_values(facts: Facts) -> dict[str, object]:
    full = facts.source.full_config("vae")
    key = "latent_channels" if "latent_channels" in full else "z_dim"
    expression = facts.calls.latent_statistics
    assert STATISTICS.get(expression) is not None or facts.calls.unexplained
    head = "channels = latent_channels(config)\n    " if "channels" in expression else ""
    for name in ("scaling_factor", "shift_factor"):
        if isinstance(full.get(name), float):  # a configuration may leave out the class's default
            expression = expression.replace(f'config["{name}"]', f'config.get("{name}", {full[name]})')
    return {
        "vae": facts.source.parts["vae"].__name__,
        "channels": f'config.get("{key}", {full.get(key)})',
        "statistics_head": head,
        "statistics": expression,
        "vae_latents": facts.calls.vae_layout.expression.replace("latents", "scaled"),
        "decoded": _IMAGE if facts.calls.makes_images else _VIDEO,
    }


def _text_values(facts: Facts) -> dict[str, object]:
    clean = facts.calls.prompt_cleanup
    as_given = "diffusers' pipeline changes nothing."
    cleaned = "As diffusers' pipeline does, so that the same prompt is the same tokens."
    return {
        "clean": clean,
        "clean_help": as_given if clean == "text" else cleaned,
        "clean_head": "import ftfy\n\n    " if "ftfy" in clean else "",
        "text_encoders": "".join(_text_encoder(facts, encoder) for encoder in facts.source.encoders),
        "encoder_functions": "\n\n".join(_encoder_functions(facts)),
        "shapes": ", ".join(_embedding_shapes(facts)),
    }


def _text_encoder(facts: Facts, encoder: str) -> str:
    component = f"{ENCODERS[facts.source.parts[encoder].__name__]}_component"
    tokenizer = facts.source.tokenizer(encoder)
    other = f', tokenizer="{tokenizer}"' if tokenizer != "tokenizer" else ""
    length = facts.calls.text_lengths[encoder]
    fixed = f", length={length}" if length is not None else ""
    return f'TextEncoder({component}("{encoder}"), {_encode_function(encoder)}{other}{fixed}),'


def _encoder_functions(facts: Facts) -> Iterator[str]:
    for encoder in facts.source.encoders:
        found = [each for each in facts.calls.embeddings if each.encoder == encoder]
        entries = ", ".join(f'"{each.name}": {each.output.expression}' for each in found)
        yield render("encode_prompt.py", function=_encode_function(encoder), entries=entries)


def _encode_function(encoder: str) -> str:
    return f"encode{encoder.removeprefix('text_encoder')}_prompt"


def _embedding_shapes(facts: Facts) -> Iterator[str]:
    for each in facts.calls.embeddings:
        length = facts.calls.text_lengths[each.encoder]
        tokens = "settings.max_sequence_length" if length is None else str(length)
        if each.name.startswith("text_mask"):
            yield f'"{each.name}": ({tokens},)'
        elif each.name.startswith("pooled"):
            yield f'"{each.name}": ({_embedding_width(facts, each)},)'
        else:
            yield f'"{each.name}": ({tokens}, {_embedding_width(facts, each)})'


def _embedding_width(facts: Facts, embedding: Embedding) -> str:
    config = facts.source.full_config("transformer")
    names = ("pooled_projection_dim",) if embedding.name.startswith("pooled") else _TEXT_WIDTHS
    key = next((name for name in names if isinstance(config.get(name), int)), None)
    return f'config.get("{key}", {config[key]})' if key else str(config.get("hidden_size", 0))


def _predict_values(facts: Facts) -> dict[str, object]:
    latents = {each.expression for each in LAYOUTS}
    arguments = "\n".join(
        f"{name}={expression}{'.to(dtype)' if expression in latents else ''},"
        for name, expression in facts.calls.arguments.items()
    )
    body = arguments + facts.calls.velocity
    needed = {"batch": "latents.shape[0]", "dtype": "module.dtype"}
    named = {name: value for name, value in needed.items() if name in body}
    head = f"{', '.join(named)} = {', '.join(named.values())}\n    " if named else ""
    if "height" in body or "width" in body:
        head += "height, width = latents.shape[3:]\n    "
    return {"predict_head": head, "transformer_arguments": arguments, "answer": facts.calls.velocity}


def _schedulers(facts: Facts) -> str:
    source = facts.source
    if facts.calls.scheduler:
        return f'SCHEDULERS = {{"euler": {facts.calls.scheduler}, "unipc": unipc, "dpm++": dpm}}'
    scheduler = source.parts["scheduler"]
    known, given = inspect.signature(scheduler).parameters, source.configs.get("scheduler", {})
    config = {key: value for key, value in given.items() if key in known}
    lines = [f"SCHEDULER: Config = {config!r}"]
    if not config:
        lines.append('"""diffusers\' defaults, for models without a scheduler_config.json."""')
    name = scheduler.__name__
    return "\n".join((*lines, "", f'SCHEDULERS = {{"{facts.schedulers[0]}": scheduler_of("{name}", SCHEDULER)}}'))


def _own_settings(facts: Facts) -> str:
    readers = ["own_shift"] if facts.calls.scheduler else []
    if "max_text_seq_length" in facts.source.full_config("transformer"):
        readers.append("own_text_length")
    merged = f"lambda read: {{{', '.join(f'**{name}(read)' for name in readers)}}}"
    lines = []
    if not facts.calls.scheduler:
        scheduler = facts.source.parts["scheduler"].__name__
        lines.append(f'own_schedulers=own_scheduler("{facts.schedulers[0]}", "{scheduler}"),')
    if readers:
        lines.append(f"own_settings={readers[0] if len(readers) == 1 else merged},")
    return "\n".join(lines)


def _tuple(values: tuple[str, ...]) -> str:
    inner = ", ".join(f'"{value}"' for value in values)
    return f"({inner},)" if len(values) == 1 else f"({inner})"
