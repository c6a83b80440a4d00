"""docs/python.md: every Python block runs, one after the other, and the page in Chinese has the same code."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from comfy_tpu.config import GenerationSettings
from comfy_tpu.parallel.mesh import make_placement
from comfy_tpu.pipeline import video
from comfy_tpu.pipeline.video import VideoPipeline

DOCS = Path(__file__).parents[1] / "docs"


def blocks(page: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.slow  # by default: the same calls in test_facade.py
def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two steps wherever a page asks for more, and one device: what the demo model shows is not the subject."""
    settings = VideoPipeline.settings

    def few_steps(self: VideoPipeline, **chosen: Any) -> GenerationSettings:
        made = settings(self, **chosen)
        return dataclasses.replace(made, num_inference_steps=min(2, made.num_inference_steps))

    monkeypatch.setattr(VideoPipeline, "settings", few_steps)
    monkeypatch.setattr(video, "make_placement", lambda *_, **__: make_placement("single"))
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for number, code in enumerate(blocks("python.md"), 1):
        exec(compile(code, f"docs/python.md, block {number}", "exec"), names)
    assert {path.name for path in tmp_path.iterdir()} == {"circle.mp4", "square.gif"}


def test_the_chinese_page_has_the_same_code() -> None:
    def without_comments(code: str) -> str:
        return re.sub(r" *#.*", "", code)

    assert [*map(without_comments, blocks("python.zh-CN.md"))] == [*map(without_comments, blocks("python.md"))]
