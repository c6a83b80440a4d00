"""The nodes of a new family: their entry, their example workflow, their names and help pages in two languages."""

from __future__ import annotations

import copy
import json
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from comfy_tpu.errors import GUIDE, UnsupportedError
from comfy_tpu.porting.scaffold.facts import Facts
from comfy_tpu.porting.scaffold.template_files import render

KINDS = ("TextEncoder", "TPUSampler", "TPUVAEDecoder", "TPUPipeline")
WIDGETS = ("INT", "FLOAT", "STRING", "COMBO", "BOOLEAN")
_ENCODERS = {"T5EncoderModel": "T5", "UMT5EncoderModel": "UMT5", "CLIPTextModel": "CLIP"}
SIZE_MIN = 256
"""Of a node's height and width, as comfy/inputs.py has it, which only ComfyUI can import."""
_FRAMES_MAX = 121
"""Of a node, unless its family says more."""
Schema = Mapping[str, Any]
"""Of a node, as tests/comfy_pack/stand_in.py records it."""


def node_entry(facts: Facts) -> str:
    """The entry of comfy/node_families.py."""
    encoders = dict.fromkeys(_ENCODERS[facts.source.parts[each].__name__] for each in facts.source.encoders)
    scheduler, *others = facts.schedulers
    return render(
        "node_family.py",
        constant=facts.constant,
        key=facts.key,
        title=facts.title,
        model_id=facts.model_id,
        pipeline=facts.source.name,
        defaults=facts.written_defaults,
        encoders=f"{' and '.join(encoders)} encoder{'s' if len(facts.source.encoders) > 1 else ''}",
        extras=facts.extras,
        options="\n".join(_node_options(facts)),
        width=facts.defaults.width,
        height=facts.defaults.height,
        schedulers=facts.schedulers,
        scheduler=scheduler,
        multistep=f"; {' and '.join(others)} are multistep ones" if others else "",
    )


def _node_options(facts: Facts) -> Iterator[str]:
    if facts.picture:
        yield "picture=True,\nsize_max=2048,"
    else:
        frames, fps = facts.defaults.num_frames, facts.defaults.fps
        yield f"frames_step={facts.learned.frames_multiple},"
        if frames > _FRAMES_MAX:
            yield f"frames_max={frames},"
        yield f'frames_help="{frames} frames at {fps} frames a second are {frames / fps:.0f} seconds.",'
        shift = "a factor on the model's own" if facts.learned.scheduler else "this model's scheduler has no use for it"
        yield f'shift_help="{shift}",\ntrained_fps="{fps}",'
    if size_step(facts) != 16:
        yield f"size_step={size_step(facts)},"


def size_step(facts: Facts) -> int:
    """ComfyUI's values are its smallest one plus steps: they are multiples only where the smallest one is."""
    if SIZE_MIN % facts.size_multiple:
        raise UnsupportedError(
            f"sizes of {facts.title} are multiples of {facts.size_multiple}, and the smallest of a node, {SIZE_MIN}, "
            f"is none; write the family by hand, {GUIDE} says how. Nothing was written"
        )
    return max(facts.size_multiple, 16)


def specified(facts: Facts, schemas: Mapping[str, Schema]) -> str:
    """Entries of SPECIFIED in tests/comfy_pack/test_nodes.py."""
    lines = []
    for kind in KINDS:
        node = schemas[f"{facts.key}{kind}"]
        given = [(each["id"], each["type"], _pinned(each)) for each in node["inputs"]]
        made = [(each["name"], each["type"]) for each in node["outputs"]]
        lines.append(f'    "{node["id"]}": ("{node["display_name"]}", "{node["category"]}", {given!r}, {made!r}),\n')
    return "".join(lines)


def _pinned(given: Mapping[str, Any]) -> dict[str, Any]:
    names = ("default", "min", "max", "step", "options", "multiline", "control_after_generate")
    pinned = {name: given[name] for name in names if name in given and given[name] is not None}
    return pinned | ({"optional": True} if given["optional"] else {})


# Workflow


def workflow(facts: Facts, base: Mapping[str, Any], schemas: Mapping[str, Schema]) -> str:
    """From the example of a family that makes the same: the same places and links, this family's nodes."""
    made: Any = copy.deepcopy(base)
    made["id"] = str(uuid.uuid5(uuid.NAMESPACE_URL, facts.template))
    for node in made["nodes"]:
        kind = next((each for each in KINDS if node["type"].endswith(each)), None)
        if kind is not None:
            node["type"] = f"{facts.key}{kind}"
            node["properties"]["Node name for S&R"] = node["type"]
            _fill(node, schemas[node["type"]], facts)
        elif node["type"] in ("SaveImage", "SaveVideo"):
            values = node["widgets_values"]
            values[0] = facts.template if facts.picture else f"video/{facts.template}"
        elif node["type"] == "MarkdownNote":
            node["widgets_values"] = [_note(facts)]
    numbers = {node["id"]: node for node in made["nodes"]}
    for link in made["links"]:  # sockets may stand elsewhere
        _, _, _, destination, place, _ = link
        entry = numbers[destination]["inputs"]
        for index, socket in enumerate(entry):
            if socket["link"] == link[0]:
                link[4] = index
        assert entry[link[4]]["link"] == link[0], place
    return json.dumps(made, indent=2, ensure_ascii=False) + "\n"


def _fill(node: dict[str, Any], schema: Schema, facts: Facts) -> None:
    linked = {socket["name"]: socket["link"] for socket in node["inputs"]}
    widgets = [each for each in schema["inputs"] if each["type"] in WIDGETS]
    node["inputs"] = []
    for each in [*(each for each in schema["inputs"] if each["type"] not in WIDGETS), *widgets]:
        socket: dict[str, Any] = {"name": each["id"]}
        if each["optional"]:
            socket["shape"] = 7
        socket["type"] = each["type"]
        if each["type"] in WIDGETS:
            socket["widget"] = {"name": each["id"]}
        socket["link"] = linked.get(each["id"])
        node["inputs"].append(socket)
    values: list[Any] = []
    for each in widgets:
        shown = "A paper boat on a quiet pond at dawn, mist over the water, soft light"
        values.append(shown if each["id"] == "prompt" else each.get("default", ""))
        if each.get("control_after_generate"):
            values.append("fixed")
    node["widgets_values"] = values


def _note(facts: Facts) -> str:
    frames = facts.defaults.num_frames
    return render(
        "workflow_note.md",
        title=facts.title,
        size=f"{facts.defaults.width} × {facts.defaults.height}",
        frames="" if facts.picture else f", {frames} frames",
        frames_zh="" if facts.picture else f"，{frames} 帧",
        **_sampling(facts),
    ).rstrip("\n")


def _sampling(facts: Facts) -> dict[str, object]:
    defaults = facts.defaults
    return {
        "steps": defaults.num_inference_steps,
        "guidance_scale": defaults.guidance_scale,
        "scheduler": defaults.scheduler,
    }


# Names and help pages


_ZH_KINDS = {
    "TextEncoder": "{} 文本编码器（TPU）",
    "TPUSampler": "{} TPU 采样器",
    "TPUVAEDecoder": "{} TPU VAE 解码器",
    "TPUPipeline": "{} TPU 完整流程",
}


def english(schema: Schema) -> dict[str, Any]:
    """An entry of locales/en: what the node says itself."""
    given: dict[str, Any] = {}
    for each in schema["inputs"]:
        given[each["id"]] = {"name": each["id"], "tooltip": each["tooltip"]}
        if each["id"] == "seed":
            given["control_after_generate"] = {"name": "control after generate"}
    made = {
        str(number): {"name": each["name"], "tooltip": each["tooltip"]} for number, each in enumerate(schema["outputs"])
    }
    return {
        "display_name": schema["display_name"],
        "description": schema["description"],
        "inputs": given,
        "outputs": made,
    }


def chinese(facts: Facts, kind: str, schema: Schema, base: Mapping[str, Any]) -> dict[str, Any]:
    """`base`: the entry of the same node of a family that makes the same, for the names that all nodes share."""
    own = _own_chinese(facts)
    given: dict[str, Any] = {}
    for each in schema["inputs"]:
        name = base["inputs"][each["id"]]["name"]
        given[each["id"]] = {"name": name, "tooltip": own.get(each["id"], base["inputs"][each["id"]]["tooltip"])}
        if each["id"] == "seed":
            given["control_after_generate"] = dict(base["inputs"]["control_after_generate"])
    made = {number: dict(entry) for number, entry in base["outputs"].items()}
    if kind == "TPUSampler":
        made["0"]["tooltip"] = f"供 {facts.title} TPU VAE 解码器或 ComfyUI 自带的 VAE 解码使用。"
    description = base["description"]
    if kind == "TextEncoder":
        description = f"在设备上用 {facts.title} 的文本编码器读取提示词和负面提示词。"
    return {
        "display_name": _ZH_KINDS[kind].format(facts.title),
        "description": description,
        "inputs": given,
        "outputs": made,
    }


def _own_chinese(facts: Facts) -> dict[str, str]:
    noun, title, defaults = "画面" if facts.picture else "视频", facts.title, facts.defaults
    size = f"{title} 的训练尺寸为 {defaults.width}×{defaults.height}。"
    own, *others = facts.schedulers
    multistep = f"，{' 和 '.join(others)} 为多步法" if others else ""
    return {
        "prompt": f"描述{noun}内容，用英文。",
        "negative_prompt": f"描述{noun}中不应出现的内容。仅当 guidance_scale 大于 1 时生效。",
        "prompt_embeds": f"来自 {title} 文本编码器（TPU）。",
        "negative_prompt_embeds": "负面提示词的编码结果。guidance_scale 不大于 1 时不使用。",
        "height": f"画面高度（像素），须为 {size_step(facts)} 的倍数。{size}",
        "width": f"画面宽度（像素），须为 {size_step(facts)} 的倍数。{size}",
        "num_frames": f"视频的总帧数，须为 {facts.learned.frames_multiple}n+1。",
        "guidance_scale": "对提示词的遵循程度。不大于 1 时不使用负面提示词，每步只计算一路而不是两路："
        "单芯片上计算量减半，在 dp=2 的布局上不节省时间。",
        "flow_shift": "在高噪声阶段停留多久。" if facts.learned.scheduler else "该模型的调度器不使用它。",
        "fps": f"视频每秒的帧数。{title} 以 {defaults.fps} 帧/秒训练。",
        "scheduler": f"求解器。{own} 是 {title} 的默认选择{multistep}。",
        "latents": f"来自 {title} TPU 采样器，或任意适用于 {title} 的 ComfyUI 采样器或 VAE 编码。",
    }


def help_page(facts: Facts, schema: Schema, names: Mapping[str, Any], language: str) -> str:
    """`names`: the node's entry in that language's locale."""
    zh = language == "zh"
    inputs, outputs = [], []
    for each in schema["inputs"]:
        entry = names["inputs"][each["id"]]
        label = f"`{each['id']}` {entry['name']}" if zh else f"`{each['id']}`"
        space = "" if zh else " "
        inputs.append(f"* {label} — {_kind(each, zh)}{space}{_explained(facts, each, entry['tooltip'], zh)}")
    for number, each in enumerate(schema["outputs"]):
        entry = names["outputs"][str(number)]
        label = f"`{each['name']}` {entry['name']}" if zh else f"`{each['name']}`"
        outputs.append(f"* {label} — {each['type']}{'：' if zh else ': '}{entry['tooltip']}")
    return render(
        f"help_page.{language}.md",
        display_name=names["display_name"],
        description=names["description"],
        inputs="\n".join(inputs),
        outputs="\n".join(outputs),
        template=facts.template,
    )


def _kind(given: Mapping[str, Any], zh: bool) -> str:
    stop, opening, closing, default = ("。", "（", "）", "默认") if zh else (".", " (", ")", "default")
    if given["type"] in ("INT", "FLOAT"):
        upper = "2⁶⁴−1" if given["max"] == 2**64 - 1 else f"{given['max']:g}"
        return f"{given['min']:g}–{upper}{opening}{default} {given['default']}{closing}{stop}"
    if given["id"] == "scheduler":
        options = ("、" if zh else ", ").join(given["options"])
        return f"{options}{opening}{default} {given['default']}{closing}{stop}"
    if given["type"] == "STRING":
        return ("文本" if zh else "text") + stop
    if given["type"] == "COMBO":
        return "列表。" if zh else "a list."
    optional = ("，可选" if zh else ", optional") if given["optional"] else ""
    return f"{given['type']}{optional}{stop}"


def _explained(facts: Facts, given: Mapping[str, Any], tooltip: str, zh: bool) -> str:
    if given["id"] == "num_frames" and not zh and f"{facts.learned.frames_multiple}n+1" not in tooltip:
        return f"{facts.learned.frames_multiple}n+1 of them."
    return tooltip


# The guide


def guide_row(facts: Facts, *, zh: bool) -> str:
    size = f"{facts.defaults.width}{'×' if zh else ' × '}{facts.defaults.height}"
    return f"| `{facts.template}` | {facts.title}{'，' if zh else ', '}{size} |\n"


def guide_section(facts: Facts, *, zh: bool) -> str:
    defaults = facts.defaults
    kind = "Pictures" if facts.picture else f"Videos of {defaults.num_frames} frames"
    kind_zh = "图像" if facts.picture else f"视频：{defaults.num_frames} 帧"
    section = render(
        f"guide_section.{'zh' if zh else 'en'}.md",
        title=facts.title,
        ids=("、" if zh else ", ").join(f"`{facts.key}{kind}`" for kind in KINDS),
        kind=kind_zh if zh else kind,
        height=defaults.height,
        width=defaults.width,
        **_sampling(facts),
    )
    return f"{section}\n"
