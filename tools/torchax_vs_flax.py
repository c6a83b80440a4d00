"""Writes the figures of benchmarks/vae into docs/torchax-vs-flax.md and its Chinese twin, and draws the plots."""

from __future__ import annotations

from pathlib import Path

from comfy_tpu.bench.results import read_runs
from comfy_tpu.bench.vae_report import Language, plots, tables, write_texts

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "vae" / "cpu.json"
PAGES: dict[Language, Path] = {
    "en": ROOT / "docs" / "torchax-vs-flax.md",
    "zh-CN": ROOT / "docs" / "torchax-vs-flax.zh-CN.md",
}
BEGIN, END = "<!-- written by `make torchax-vs-flax` -->", "<!-- end -->"


def texts() -> dict[Path, str]:
    """Every file as it has to be. The last run of the file is shown."""
    run = read_runs(RESULTS)[-1]
    drawn = {ROOT / "docs" / f"torchax-vs-flax-{ending}.svg": text for ending, text in plots(run).items()}
    pages = {
        path: with_figures(path.read_text(encoding="utf-8"), tables(run, language), path)
        for language, path in PAGES.items()
    }
    return drawn | pages


def with_figures(page: str, figures: str, path: Path) -> str:
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{path} has no line {BEGIN}, or no {END} behind it; put one where the tables belong")
    return f"{before}{BEGIN}\n\n{figures.strip()}\n\n{END}{after}"


if __name__ == "__main__":
    write_texts(texts())
