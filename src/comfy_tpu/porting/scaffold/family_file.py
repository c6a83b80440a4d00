"""The family's file, as text that `ruff format` brings into shape."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from comfy_tpu.porting.scaffold.checkout import MARK
from comfy_tpu.porting.scaffold.facts import Facts
from comfy_tpu.porting.scaffold.hypotheses import LAYOUTS, STATISTICS

_COMPONENTS = {
    "T5EncoderModel": "t5_component",
    "UMT5EncoderModel": "umt5_component",
    "CLIPTextModel": "clip_component",
}
_FEATURES = (
    *("caption_channels", "text_embed_dim", "joint_attention_dim", "cap_feat_dim", "text_dim", "context_dim"),
    *("cross_attention_input_dim", "cross_attention_dim"),
)
"""What configurations call the width of a text's embeddings."""


def family_file(facts: Facts) -> str:
    body = "\n\n\n".join(
        (
            _components(facts),
            _latents(facts),
            _prompt(facts),
            *_encoders(facts),
            _shapes(facts),
            _prepare(facts),
            _predict(facts),
            _decode(facts),
            _workload(facts),
            _family(facts),
        )
    )
    return f"{_head(facts, body)}\n\n{body}\n"


def _head(facts: Facts, body: str) -> str:
    def used(*names: str) -> str:
        return ", ".join(name for name in sorted(names) if re.search(rf'(?<!["\w]){name}(?!["\w])', body))

    lines = [
        f'"""{facts.title}: {facts.noun}s. {MARK} from diffusers\' {facts.source.name}.',
        "",
        "It calls diffusers' own modules as that pipeline was seen to call them.",
        f'tests/families/test_{facts.name}.py compares the two."""',
        "",
        "from __future__ import annotations",
        "",
        *(f"import {name}" for name in ("html", "re") if f"{name}." in facts.learned.clean),
        "from typing import Any",
        "",
        "import torch",
        "",
        "from comfy_tpu.compiler.component import ComponentSpec",
        "from comfy_tpu.compiler.stacking import LayerStack" if facts.proposal.stacks else "",
        "from comfy_tpu.config import GenerationSettings",
        "from comfy_tpu.families.family import Cache, Config, Limits, TextEncoder, VideoFamily",
    ]
    if packed := used("as_latents", "as_tokens"):
        lines.append(f"from comfy_tpu.families.patches import {packed}")
    lines.append(f"from comfy_tpu.families.ported import {used(*_PORTED)}")
    if facts.learned.scheduler:
        lines.append(
            f"from comfy_tpu.families.schedulers import {used('dpm', 'euler', 'euler_from_one', 'own_shift', 'unipc')}"
        )
    lines.append(f"from comfy_tpu.families.text_encoders import {used(*_TEXT)}")
    kinds = sorted({rule.kind for rule in facts.proposal.rules} | {"replicate"})
    lines.append(f"from comfy_tpu.parallel.rules import {', '.join(kinds)}")
    lines.append("from comfy_tpu.parallel.workload import Workload")
    return "\n".join(lines)


_PORTED = (
    "by_pipeline",
    "as_frames",
    "in_vae_scale",
    "module_of",
    "own_scheduler",
    "own_text_length",
    "scheduler_of",
    "unexplained",
    "workload_of",
)
_TEXT = (
    "clip_component",
    "encoded_t5",
    "encoded_umt5",
    "pooled_clip",
    "t5_component",
    "umt5_component",
    "without_filling",
)


def _components(facts: Facts) -> str:
    parts, proposal = facts.source.parts, facts.proposal
    name = parts["transformer"].__name__
    keep = getattr(parts["transformer"], "_keep_in_fp32_modules", None) or ()
    lines = ["TRANSFORMER = ComponentSpec(", 'name="transformer",', f'classes=("{name}",),']
    if proposal.heads:
        lines.append(f'heads="{proposal.heads}",')
    lines.append(f'build=module_of("{name}", {_switches(facts)}),')
    if proposal.stacks:
        lines.append("stacks=(")
        for stack in proposal.stacks:
            carry = "" if stack.carry == ("hidden_states",) else f", carry={_tuple(stack.carry)}"
            lines.append(f'LayerStack("{stack.path}"{carry}),')
        lines.append("),")
    if keep:
        lines.append(f"float32={_tuple(tuple(f'*{each}*' for each in keep))},")
    lines += ["rules=(", *_rules(facts), "),", ")", ""]
    vae = parts["vae"].__name__
    lines += [
        "VAE = ComponentSpec(",
        'name="vae",',
        f'classes=("{vae}",),',
        f'build=module_of("{vae}"),',
        'rules=(replicate("*"),),  # the picture is split over the mesh, not the weights',
        ")",
    ]
    return "\n".join(lines)


def _switches(facts: Facts) -> str:
    config = facts.source.full_config("transformer")
    return repr({key: value for key, value in config.items() if isinstance(value, bool)})


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


def _latents(facts: Facts) -> str:
    key = "latent_channels" if "latent_channels" in facts.source.full_config("vae") else "z_dim"
    default = facts.source.full_config("vae").get(key)
    keys = STATISTICS.get(facts.learned.statistics)
    channels = "    channels = latent_channels(config)\n" if "channels" in facts.learned.statistics else ""
    assert keys is not None or facts.learned.unexplained
    return f'''def latent_channels(config: Config) -> int:
    return int(config.get("{key}", {default}))


def latent_statistics(config: Config) -> tuple[list[float], list[float]]:
{channels}    return {_with_defaults(facts, facts.learned.statistics)}'''


def _with_defaults(facts: Facts, expression: str) -> str:
    """A configuration may leave out what is as in the class."""
    full = facts.source.full_config("vae")
    for key in ("scaling_factor", "shift_factor"):
        if isinstance(full.get(key), float):
            expression = expression.replace(f'config["{key}"]', f'config.get("{key}", {full[key]})')
    return expression


def _prompt(facts: Facts) -> str:
    clean = facts.learned.clean
    what = "changes nothing" if clean == "text" else "does, so that the same prompt is the same tokens"
    needs = "    import ftfy\n\n" if "ftfy" in clean else ""
    verb = f"diffusers' pipeline {what}." if clean == "text" else f"As diffusers' pipeline {what}."
    return f'''def clean_prompt(text: str) -> str:
    """{verb}"""
{needs}    return {clean}'''


def _encoders(facts: Facts) -> Iterator[str]:
    for encoder in facts.source.encoders:
        found = [each for each in facts.learned.embeddings if each.encoder == encoder]
        entries = ", ".join(f'"{each.name}": {each.reading.written}' for each in found)
        yield f"""def {_encode(encoder)}(
    module: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    return {{{entries}}}"""


def _encode(encoder: str) -> str:
    return f"encode{encoder.removeprefix('text_encoder')}_prompt" if encoder != "text_encoder" else "encode_prompt"


def _features(facts: Facts, embedding: Any) -> str:
    config = facts.source.full_config("transformer")
    names = ("pooled_projection_dim",) if embedding.name.startswith("pooled") else _FEATURES
    key = next((name for name in names if isinstance(config.get(name), int)), None)
    return f'config.get("{key}", {config[key]})' if key else str(config.get("hidden_size", 0))


def _shapes(facts: Facts) -> str:
    entries = []
    for each in facts.learned.embeddings:
        length = facts.learned.lengths[each.encoder]
        tokens = "settings.max_sequence_length" if length is None else str(length)
        if each.name.startswith("text_mask"):
            entries.append(f'"{each.name}": ({tokens},)')
        elif each.name.startswith("pooled"):
            entries.append(f'"{each.name}": ({_features(facts, each)},)')
        else:
            entries.append(f'"{each.name}": ({tokens}, {_features(facts, each)})')
    return f"""def embedding_shapes(config: Config, settings: GenerationSettings) -> dict[str, tuple[int, ...]]:
    return {{{", ".join(entries)}}}"""


def _prepare(facts: Facts) -> str:
    names = [each.name for each in facts.learned.embeddings]
    given = ", ".join(f"{name}: torch.Tensor" for name in names)
    entries = ", ".join(f'"{name}": {name}' for name in names)
    return f'''def prepare(module: Any, {given}) -> dict[str, torch.Tensor]:
    """The transformer reads the prompt in every step. What no step changes could be computed here, once."""
    return {{{entries}}}'''


def _predict(facts: Facts) -> str:
    learned = facts.learned
    given = "".join(f"    {each.name}: torch.Tensor,\n" for each in learned.embeddings)
    latents = {each.there for each in LAYOUTS}
    calls = []
    for name, expression in learned.arguments.items():
        calls.append(f"{name}={expression}{'.to(dtype)' if expression in latents else ''},")
    text = "\n        ".join([*calls, "return_dict=False,"])
    body = f"""    answer = module(
        {text}
    )[0]
    return {learned.answer}"""
    facts_needed = []
    if "batch" in body:
        facts_needed.append(("batch", "latents.shape[0]"))
    if "dtype" in body:
        facts_needed.append(("dtype", "module.dtype"))
    sizes = "    height, width = latents.shape[3:]\n" if "height" in body or "width" in body else ""
    names = ", ".join(name for name, _ in facts_needed)
    values = ", ".join(value for _, value in facts_needed)
    first = f"    {names} = {values}\n" if facts_needed else ""
    return f"""def predict(
    module: Any,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    guidance_scale: torch.Tensor,
{given}) -> torch.Tensor:
{first}{sizes}{body}"""


def _decode(facts: Facts) -> str:
    there = facts.learned.vae_layout.there.replace("latents", "scaled")
    frames = "1" if facts.picture else "frames"
    what = "the picture. Nothing is remembered." if facts.picture else "the video, all of it at once."
    return f'''def decode_frame(module: Any, latent: torch.Tensor, cache: Cache | None) -> tuple[torch.Tensor, Cache]:
    """[batch, channels, {frames}, height, width] of the transformer's latents -> {what}"""
    scaled = in_vae_scale(latent, latent_statistics(module.config)).to(module.dtype)
    return as_frames(module.decode({there}, return_dict=False)[0]), []'''


def _workload(facts: Facts) -> str:
    full = facts.source.full_config("transformer")
    heads = facts.proposal.heads
    size = next((key for key in ("attention_head_dim", "head_dim") if isinstance(full.get(key), int)), None)
    channels = facts.source.full_config("vae").get("latent_channels", 16)
    rows = ", ".join(f'"{pattern}": "{kind}"' for pattern, kind in facts.proposal.rows.items())
    head_count = f'config.get("{heads}", {full[heads]})' if heads else "1"
    head_size = f'config.get("{size}", {full[size]})' if size else "64"
    return f'''def workload(config: Config, settings: GenerationSettings) -> Workload:
    return workload_of(
        TRANSFORMER,
        config,
        settings,
        patch={facts.patch},
        spatial_scale={facts.learned.spatial_scale},
        temporal_scale={facts.learned.temporal_scale},
        text="{"joint" if facts.proposal.joint else "keys"}",
        heads={head_count},
        head_dim={head_size},
        channels={channels},
        # Of the other matrices every token of the {facts.noun} is a row.
        rows={{{rows}}},
    )'''


def _family(facts: Facts) -> str:
    learned, source = facts.learned, facts.source
    lines = []
    if learned.scheduler:
        schedulers = f'{{"euler": {learned.scheduler}, "unipc": unipc, "dpm++": dpm}}'
    else:
        config = {
            key: value
            for key, value in source.configs.get("scheduler", {}).items()
            if key in inspect.signature(source.parts["scheduler"]).parameters
        }
        lines.append(f"SCHEDULER: Config = {config!r}")
        if not config:
            lines.append('"""Of models that say nothing of theirs: diffusers\' defaults."""')
        lines.append("")
        schedulers = f'{{"{facts.schedulers[0]}": scheduler_of("{source.parts["scheduler"].__name__}", SCHEDULER)}}'
    lines.append(f"SCHEDULERS = {schedulers}")
    published = ""
    if source.directory is not None:
        config = dict(source.configs.get("transformer", {}))
        lines += ["", f"PUBLISHED: Config = {config!r}"]
        published = f'"{facts.model_id}": PUBLISHED'
    encoders = "".join(_text_encoder(facts, encoder) for encoder in source.encoders)
    height, width = facts.defaults.height, facts.defaults.width
    presets = {f"{width}×{height}": {"height": height, "width": width}}
    frames = 1 if facts.picture else 1025
    reads = ["own_shift"] if learned.scheduler else []
    if "max_text_seq_length" in source.full_config("transformer"):
        reads.append("own_text_length")
    both = f"lambda read: {{{', '.join(f'**{name}(read)' for name in reads)}}}"
    own = f"    own_settings={reads[0] if len(reads) == 1 else both},\n" if reads else ""
    if not learned.scheduler:
        own += f'    own_schedulers=own_scheduler("{facts.schedulers[0]}", "{source.parts["scheduler"].__name__}"),\n'
    whole = "" if facts.picture else "    whole=True,\n"
    tokens = (
        f"        tokens_max={facts.defaults.max_sequence_length},\n"
        if facts.defaults.max_sequence_length > 512
        else ""
    )
    lines.append(f'''

{facts.constant} = VideoFamily(
    name="{facts.title}",
    matches=lambda index, config: index.get("_class_name") == "{source.name}",
    pipeline_classes=("{source.name}",),
    transformers=(TRANSFORMER,),
    text_encoders=({encoders}),
    vae=VAE,
    limits=Limits(
        size_multiple={facts.size_multiple},
        size_min={facts.size_multiple},
        size_max=2048,
        frames_multiple={learned.frames_multiple},
        frames_max={frames},
        schedulers=tuple(SCHEDULERS),
{tokens}    ),
    defaults={facts.written_defaults},
    presets={presets!r},
    schedulers=SCHEDULERS,
    spatial_scale={learned.spatial_scale},
    temporal_scale={learned.temporal_scale},
    latent_channels=latent_channels,
    latent_statistics=latent_statistics,
    clean_prompt=clean_prompt,
    embedding_shapes=embedding_shapes,
    prepare=prepare,
    predict=predict,
    decode_frame=decode_frame,
    workload=workload,
    published={{{published}}},
{own}{whole})''')
    return "\n".join(lines)


def _text_encoder(facts: Facts, encoder: str) -> str:
    component = _COMPONENTS[facts.source.parts[encoder].__name__]
    tokenizer = facts.source.tokenizer(encoder)
    other = f', tokenizer="{tokenizer}"' if tokenizer != "tokenizer" else ""
    length = facts.learned.lengths[encoder]
    fixed = f", length={length}" if length is not None else ""
    return f'TextEncoder({component}("{encoder}"), {_encode(encoder)}{other}{fixed}),'


def _tuple(values: tuple[str, ...]) -> str:
    inner = ", ".join(f'"{value}"' for value in values)
    return f"({inner},)" if len(values) == 1 else f"({inner})"
