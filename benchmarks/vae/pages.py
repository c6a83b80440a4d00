"""Writes the figures of benchmarks/vae into docs/torchax-vs-flax.md and its Chinese twin, and draws the plots."""

from __future__ import annotations

from pathlib import Path

from benchmarks.vae.report import Language, plots, tables
from comfy_tpu.bench.report import write_texts
from comfy_tpu.bench.results import read_runs

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "vae"
RUNS: dict[str, dict[Language, str]] = {
    "h200.json": {"en": "On an H200, published channels, 480P", "zh-CN": "在 H200 上，公布的通道数，480P"},
    "h200-compile.json": {"en": "On an H200, torch.compile", "zh-CN": "在 H200 上，torch.compile"},
    "cpu.json": {"en": "On two cores", "zh-CN": "在两个核上"},
    "cpu-one-core.json": {"en": "On one core", "zh-CN": "在一个核上"},
}
"""Files -> what they are. Plots are of the first."""
PAGES: dict[Language, Path] = {
    "en": ROOT / "docs" / "torchax-vs-flax.md",
    "zh-CN": ROOT / "docs" / "torchax-vs-flax.zh-CN.md",
}
BEGIN, END = "<!-- written by `make torchax-vs-flax` -->", "<!-- end -->"


def texts() -> dict[Path, str]:
    """Every file as it has to be. The last run of each file is shown."""
    runs = {name: read_runs(RESULTS / name)[-1] for name in RUNS}
    first = next(iter(runs.values()))
    drawn = {ROOT / "docs" / f"torchax-vs-flax-{ending}.svg": text for ending, text in plots(first).items()}
    pages = {}
    for language, path in PAGES.items():
        parts = (
            f"### {RUNS[name][language]}\n\n{tables(run, language, heading='####').strip()}"
            for name, run in runs.items()
        )
        pages[path] = with_figures(path.read_text(encoding="utf-8"), "\n\n".join(parts), path)
    return drawn | pages


def with_figures(page: str, figures: str, path: Path) -> str:
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{path} has no line {BEGIN}, or no {END} behind it; put one where the tables belong")
    return f"{before}{BEGIN}\n\n{figures.strip()}\n\n{END}{after}"


if __name__ == "__main__":
    write_texts(texts())
