"""docs/defaults.md: for every published model our defaults, diffusers' and its makers', and why they differ.

`published_defaults.json` has diffusers' by pipeline class, as its signatures say, and by model what its code and the
model's scheduler say; the makers' with their source; and a reason for each difference. "same" is a text equal to ours.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import FamilyCard, ModelCard
from tools.pages.model_table import format_row
from tools.pages.sources import Json, PageError

PATHS = {"en": "docs/defaults.md", "zh": "docs/defaults.zh-CN.md"}
_DATA = Path(__file__).with_name("published_defaults.json")
_SAME = "same"
_ARGUMENTS = {
    **{name: name for name in ("height", "width", "num_frames", "num_inference_steps", "guidance_scale_2")},
    **{name: name for name in ("negative_prompt", "max_sequence_length", "stg_scale", "modality_scale")},
    **{name: name for name in ("guidance_rescale", "audio_guidance_scale", "audio_stg_scale", "audio_modality_scale")},
    "audio_guidance_rescale": "audio_guidance_rescale",
    "frame_rate": "fps",
    "spatio_temporal_guidance_blocks": "stg_block",
    "segment_frame_length": "num_frames",
    "prev_segment_conditioning_frames": "context_overlap",
}
"""Arguments of diffusers' pipelines, and our names of them. The scale of guidance has two names there."""
_INTRODUCTION = {
    "en": """# Default settings

English · [简体中文](defaults.zh-CN.md)

Every published model starts with its own settings, in nodes, command, server and Python alike. An empty field, a flag
that is left out, and 0 in a number widget (-1 where 0 means something) choose them. A single space is a negative prompt
that says nothing. A run shows what it took: on the node, in a terminal, and in the metadata of its files.

`make pages` writes this page from the family cards and `tools/pages/published_defaults.json`. A flow shift of 1 is a
factor on the model's own, which grows with the size; diffusers has no such number. An empty cell: the value is not
stated there.""",
    "zh": """# 默认设置

[English](defaults.md) · 简体中文

每个已发布的模型都从自己的设置开始，节点、命令、服务器和 Python 都一样。
空的字段、省略的参数、数字控件中的 0（若 0 有含义则为 -1）都表示这些值。
负面提示词为一个空格时表示没有。运行时会显示取了什么值：在节点上、在终端里、在文件的元数据里。

本页由 `make pages` 根据家族卡片和 `tools/pages/published_defaults.json` 写成。
flow shift 为 1 表示模型自身 shift（随尺寸增大）的倍数；diffusers 没有这样的数。空格子：那里没有说明。""",
}
_WORDS = {
    "en": {"makers": "Makers: {}.", "columns": ("setting", "comfy-tpu", "diffusers", "makers", "why")},
    "zh": {"makers": "作者：{}。", "columns": ("设置", "comfy-tpu", "diffusers", "作者", "原因")},
}
_NOTHING = {"en": ("none", "a space", "{}… ({} characters)"), "zh": ("无", "一个空格", "{}…（{} 个字符）")}


def read_data() -> Json:
    data: Json = json.loads(_DATA.read_text(encoding="utf-8"))
    return data


def signature_values(pipeline: Any) -> dict[str, Any]:
    """The defaults of a diffusers pipeline by our names, as far as its signature states them."""
    parameters = inspect.signature(pipeline.__call__).parameters
    scale = "true_cfg_scale" if pipeline.__name__.startswith("QwenImage") else "guidance_scale"
    stated = {
        ours: parameters[theirs].default
        for theirs, ours in {**_ARGUMENTS, scale: "guidance_scale"}.items()
        if theirs in parameters
    }
    blocks = stated.get("stg_block")
    stated |= {"stg_block": blocks[0]} if isinstance(blocks, list) else {}
    stated |= {"negative_prompt": stated.get("negative_prompt") or ""} if "negative_prompt" in stated else {}
    return {name: value for name, value in stated.items() if value is not None}


def compare(card: ModelCard, hub_id: str, data: Json) -> Iterator[tuple[str, Any, Any, Any, str]]:
    """(field, ours, diffusers', the makers', why they differ) of a model; None: not stated. Raises PageError for a
    difference without a reason, and for a reason without a difference."""
    entry = data["models"].get(hub_id)
    if entry is None:
        raise PageError(f"{_DATA.name} has no {hub_id}; add what diffusers and its makers do")
    theirs = {**data["diffusers"][card.pipeline_classes[0]], **entry["diffusers"]}
    makers, reasons = dict(entry["makers"]), dict(entry["why"])
    own, general = card.defaults_of(hub_id), GenerationSettings()
    chosen = {field for field in vars(general) if getattr(own, field) != getattr(general, field)}
    chosen -= {"num_frames"} if card.makes_images else set()
    for field in dict.fromkeys((*theirs, *makers, "flow_shift", "scheduler", *sorted(chosen))):
        ours = our_value(card, hub_id, field)
        made = ours if makers.get(field) == _SAME else makers.get(field)
        differs = any(other is not None and other != ours for other in (theirs.get(field), made))
        reason = reasons.pop(field, "")
        if differs != bool(reason):
            what = "differs without a reason" if differs else "has a reason and does not differ"
            raise PageError(f"{_DATA.name}: {field} of {hub_id} {what}; ours is {ours!r}")
        yield field, ours, theirs.get(field), made, reason
    if reasons:
        raise PageError(f"{_DATA.name}: {hub_id} has a reason for {min(reasons)}, which nobody states")


def our_value(card: ModelCard, hub_id: str, field: str) -> Any:
    """The value that a run has: scales of the sound that are 0 are the video's."""
    own = card.defaults_of(hub_id)
    value = getattr(own, field)
    return getattr(own, field.removeprefix("audio_")) if field.startswith("audio_") and not value else value


def defaults_page(cards: Iterable[FamilyCard], language: str) -> str:
    data, words, lines = read_data(), _WORDS[language], [_INTRODUCTION[language]]

    def say(english: str) -> str:
        if language == "en" or not english:
            return english
        if english not in data[language]:
            raise PageError(f"{_DATA.name} has no {english!r} under {language!r}")
        return str(data[language][english])

    for card in (model for family in cards for model in family.models):
        for hub_id in card.published:
            source = data["models"].get(hub_id, {}).get("source", "")
            source = say(source) if source in data["zh"] else source  # most are paths
            lines += ["", f"## {hub_id}", "", words["makers"].format(source), ""]
            lines += [format_row(words["columns"]), "|---|---|---|---|---|"]
            for field, *values, reason in compare(card, hub_id, data):
                lines.append(format_row((f"`{field}`", *(_cell(value, language) for value in values), say(reason))))
    return "\n".join(lines) + "\n"


def _cell(value: Any, language: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        none, space, text = _NOTHING[language]
        shown = value if len(value) <= 24 else text.format(value[:24], len(value))
        return none if value == "" else space if value == " " else shown
    return f"{value:g}"


def read_signatures(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What the installed diffusers says of each recorded pipeline."""
    import diffusers

    return {name: signature_values(getattr(diffusers, name)) for name in data["diffusers"]}
