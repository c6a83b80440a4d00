"""The table of the ComfyUI guide that has the inputs whose defaults and ranges differ between families."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from comfy_tpu.families.card import FamilyCard
from tools.pages.model_table import format_row, replace_between
from tools.pages.sources import Json

BEGIN = "<!-- ranges: generated from the nodes by `make pages` -->"
END = "<!-- end of ranges -->"
INPUTS = (
    *("height", "width", "num_frames", "num_inference_steps"),
    *("guidance_scale", "guidance_scale_2", "flow_shift", "fps", "scheduler"),
)


def range_table(cards: Iterable[FamilyCard], nodes: Mapping[str, Json], texts: Json) -> str:
    """`texts`: locales/<language>/help.json."""
    columns = [texts["tables"]["ranges"], *(f"`{name}`" for name in INPUTS)]
    lines = [format_row(columns), format_row("---" for _ in columns).replace(" ", "")]
    for node_set in (node_set for card in cards for node_set in card.node_sets):
        # The full pipeline has the inputs of all nodes of its family.
        pipeline = nodes.get(f"{node_set.key}TPUPipeline")
        if pipeline is None:
            continue
        given = {each["id"]: each for each in pipeline["inputs"]}
        cells = (_cell(given[name], texts) if name in given else "—" for name in INPUTS)
        lines.append(format_row([texts["tables"]["nodes"].format(key=node_set.key), *cells]))
    return "\n".join(lines)


def replace_ranges(page: str, name: str, table: str) -> str:
    """The page with the table between its markers. `name`: the page's path, for the error."""
    return replace_between(page, name, table, BEGIN, END)


def _cell(given: Json, texts: Json) -> str:
    """The default, and in brackets the range; of a list its options, the default first."""
    if given["type"] == "COMBO":
        options: list[str] = sorted(given["options"], key=lambda option: bool(option != given["default"]))
        return str(texts["format"]["list"]).join(options)
    step: Any = given.get("step", 1)
    form = ""
    if given["id"] == "num_frames" and step > 1:
        form = f"{step}n+1"
    elif given["type"] == "INT" and step > 1:
        form = f"{step}n"
    found = [f"{given['min']:g}–{given['max']:g}", *([form] if form else [])]
    return f"{given['default']} ({texts['format']['list'].join(found)})"
