"""Figures that others reported for a TPU slice, each with the command that measures the same here.

They are in `reported_figures.json` as their documents have them. Nobody of this project measured them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from comfy_tpu.bench.job import Job
from comfy_tpu.bench.tables import render_table
from comfy_tpu.bench.words import Language
from comfy_tpu.config import VAE_BACKEND, VaeBackend
from comfy_tpu.json_input import read_json

_FILE = Path(__file__).with_name("reported_figures.json")
_UNNAMED_SIZE = "720P"
"""For figures of a document that names no size: 84 s and 1.0 s are what the other document has for the VAE at 720P."""
_STEPS = 50
_PARTS: Mapping[str, tuple[str, ...]] = {
    "text": ("text",),
    "transformer": ("transformer",),
    "vae": ("vae",),
    "end-to-end": ("end-to-end",),
    "vae, cold": ("vae", "compile"),
    "vae, warm": ("vae", "compile"),
}


@dataclasses.dataclass(frozen=True)
class Figure:
    """One row of a document's table."""

    source: str
    what: str
    """A key of `_PARTS`."""
    mesh: str
    size: str = ""
    """Empty: the document does not name it."""
    backend: VaeBackend = VAE_BACKEND
    first_s: float | None = None
    """The warm-up: compiled, or taken from the compile cache."""
    later_s: float | None = None
    step_s: float | None = None

    def job(self, model: str) -> Job:
        """What measures the same."""
        return Job(
            parts=_PARTS[self.what],
            sizes=() if self.what == "text" else (self.size or _UNNAMED_SIZE,),
            peers=("ours",),
            model=model,
            mesh=self.mesh,
            vae_backend=self.backend,
            steps=_STEPS,
        )


@dataclasses.dataclass(frozen=True)
class Source:
    """A document."""

    title: str
    hardware: str
    model: str


def read_figures(path: Path = _FILE) -> tuple[dict[str, Source], list[Figure]]:
    content: dict[str, Any] = read_json(path)
    sources = {key: Source(**source) for key, source in content["sources"].items()}
    return sources, [Figure(**figure) for figure in content["figures"]]


_TEXTS: Mapping[Language, Mapping[str, Any]] = {
    "en": {
        "heading": "Reported for TPU v6e-8, and how to measure it",
        "introduction": (
            "This project has not measured a TPU. The two documents below did, on a v6e-8 with their own code, Wan 2.1 14B,\n"
            f"81 frames and {_STEPS} steps. On such a machine the command of a row measures the same with ours; `--json\n"
            "benchmarks/results/v6e-8.json` keeps the result, and `make performance` puts it on this page.\n"
            "\n"
            "* **Transformer**: with `dp=2` a forward has both branches of the guidance, so its median is a step, and "
            f"{_STEPS} of\n"
            "  them are the later run. The first run is the row's first call.\n"
            "* **VAE, cold and warm** are the rows `vae decode, cold` and `vae decode, warm` of the part `compile`; the decode\n"
            "  is the part `vae`. The second document names no size; "
            f"{_UNNAMED_SIZE} is taken, where the first has nearly the same figures."
        ),
        "columns": ["what", "size", "mesh", "VAE by", "first run", "later runs", "a step", "measured with"],
        "whats": {
            "text": "text encoder",
            "transformer": "transformer",
            "vae": "VAE",
            "end-to-end": "all of it",
            "vae, cold": "VAE, empty cache",
            "vae, warm": "VAE, from the cache",
        },
        "unnamed": "not named",
    },
    "zh-CN": {
        "heading": "TPU v6e-8 上已有的数据，以及如何复现",
        "introduction": (
            "本项目没有在 TPU 上测过。下面两份文档在 v6e-8 上用各自的代码测过：Wan 2.1 14B，81 帧，"
            f"{_STEPS} 步。\n"
            "在同样的机器上，每一行的命令用我们的代码测同一件事；加上 `--json benchmarks/results/v6e-8.json` 保存结果，\n"
            "`make performance` 把它写进本页。\n"
            "\n"
            "* **Transformer**：`dp=2` 时一次前向包含 guidance 的两个分支，所以它的中位数就是一步的时间，"
            f"{_STEPS} 步就是“后续运行”。\n"
            "  “首次运行”对应该行的首次调用。\n"
            "* **VAE 冷启动和热启动**对应 `compile` 部分的 `vae decode, cold` 和 `vae decode, warm` 两行；解码时间在 `vae` 部分。\n"
            f"  第二份文档没有给出尺寸，这里取 {_UNNAMED_SIZE}：第一份文档在这个尺寸下的数字与它几乎相同。"
        ),
        "columns": ["项目", "尺寸", "mesh", "VAE 后端", "首次运行", "后续运行", "每步", "复现命令"],
        "whats": {
            "text": "文本编码器",
            "transformer": "Transformer",
            "vae": "VAE",
            "end-to-end": "总计",
            "vae, cold": "VAE，缓存为空",
            "vae, warm": "VAE，使用缓存",
        },
        "unnamed": "未给出",
    },
}


def format_figures(language: Language) -> str:
    """The section of a page: every figure beside its command, a table for each document."""
    texts = _TEXTS[language]
    sources, figures = read_figures()
    lines = [f"## {texts['heading']}", "", texts["introduction"], ""]
    for key, source in sources.items():
        rows = [_row(figure, source, texts) for figure in figures if figure.source == key]
        lines += [f"### {source.title}", "", render_table(texts["columns"], rows, padded=False), ""]
    return "\n".join(lines)


def _row(figure: Figure, source: Source, texts: Mapping[str, Any]) -> Sequence[str]:
    seconds = [figure.first_s, figure.later_s, figure.step_s]
    return [
        texts["whats"][figure.what],
        figure.size or texts["unnamed"],
        figure.mesh,
        figure.backend if "vae" in figure.what else "",
        *("" if value is None else f"{value:g} s" for value in seconds),
        f"`{figure.job(source.model).command}`",
    ]
