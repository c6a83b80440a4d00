"""The example workflows as the frontend lays them out: sizes of nodes are known only there."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.comfyui.browser.frontend import Frontend
from tests.comfyui.checkout import ROOT

pytestmark = pytest.mark.comfyui

TEMPLATES = sorted((ROOT / "example_workflows").glob("*.json"))
WIDTH_MAX = 1600
PROGRESS_TEXT = 58
"""The height that the frontend adds to a node for the text that it shows while it runs."""

_BOXES = """() => app.graph.nodes.map((node) => {
  const [left, top, width, height] = node.boundingRect
  return { type: node.type, saved: [...node.size], needed: [...node.computeSize()], left, top, width, height }
})"""
# The note's text, against the room that it has.
_CUT_OFF = """() => [...document.querySelectorAll(".dom-widget .tiptap")].filter((text) => {
  const last = text.lastElementChild.getBoundingClientRect(), box = text.getBoundingClientRect()
  return last.bottom > box.bottom || text.scrollWidth > text.clientWidth
}).map((text) => text.textContent)"""


@pytest.mark.parametrize("locale", ["en", "zh"])
def test_nothing_overlaps_or_is_cut_off(frontend: Frontend, locale: str) -> None:
    frontend.open(
        Locale=locale,
        **{"Workflow.ShowMissingModelsWarning": False, "Workflow.ShowMissingNodesWarning": False},
    )
    frontend.page.set_viewport_size({"width": 1900, "height": 1500})
    for path in TEMPLATES:
        frontend.page.evaluate("graph => app.loadGraphData(graph)", json.loads(path.read_text(encoding="utf-8")))
        frontend.page.evaluate("() => { app.canvas.ds.scale = 1; app.canvas.ds.offset = [150, 120] }")
        frontend.page.locator(".dom-widget .tiptap").first.wait_for()
        frontend.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        _check_layout(path, frontend.page.evaluate(_BOXES))
        assert frontend.page.evaluate(_CUT_OFF) == [], path.stem


def _check_layout(path: Path, boxes: list[dict[str, Any]]) -> None:
    for one, other in itertools.combinations(boxes, 2):
        apart = any(
            one[at] + one[side] <= other[at] or other[at] + other[side] <= one[at]
            for at, side in (("left", "width"), ("top", "height"))
        )
        assert apart, f"{path.stem}: {one['type']} lies on {other['type']}"
    right, left = max(box["left"] + box["width"] for box in boxes), min(box["left"] for box in boxes)
    assert right - left <= WIDTH_MAX, path.stem
    for box in boxes:
        room = PROGRESS_TEXT if "TPU" in box["type"] and "TPUCompile" not in box["type"] else 0
        if box["type"] in ("TPUInfo", "VHS_VideoCombine"):
            continue
        assert box["needed"][1] + room <= box["saved"][1], f"{path.stem}: {box['type']} grows when it runs"
