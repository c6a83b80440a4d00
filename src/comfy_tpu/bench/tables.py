"""Rows as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from comfy_tpu.bench.job import LOSSY_PEERS
from comfy_tpu.bench.page_texts import ENGLISH, PageTexts
from comfy_tpu.bench.results import Row, Run

TITLES = {
    "transformer": "Transformer, one forward",
    "accuracy": "Error of two blocks of the transformer against float32",
    "ceilings": "Best rates of the device, in the same run",
    "vae": "VAE",
    "text": "Text encoder",
    "compile": "From nothing to a program, and from the cache in a new process",
    "end-to-end": "End to end",
    "scaling": "Cost against tokens and devices",
}
PEER_NAMES = {
    "ours": "**comfy-tpu**",
    "fp8": "comfy-tpu, fp8 (lossy)",
    "eager": "diffusers eager",
    "compile": "diffusers + torch.compile",
    "fast": "comfy-tpu, fast (lossy)",
}
_REGIONAL = ("transformer", "accuracy", "end-to-end")
"""Parts in which `--compile-regional` means something."""


def make_table(rows: Sequence[tuple[Run, Row]], texts: PageTexts = ENGLISH) -> str:
    """Rows, each with the run that it is compared within; columns that nothing fills are left out."""
    columns = {}
    for title, (value, write) in _COLUMNS.items():
        values = [value(run, row) for run, row in rows]
        if any(each not in (None, "") for each in values):
            written = ["" if each is None else write(each) for each in values]
            if title in _TRANSLATED:
                written = [each and texts.translate(each) for each in written]
            columns[texts.translate(title)] = written
    lines = [list(line) for line in zip(*columns.values(), strict=True)]
    return render_table([*columns], lines, padded=texts.is_english)


def render_table(titles: Sequence[str], lines: Sequence[Sequence[str]], *, padded: bool = True) -> str:
    """A table in Markdown, numbers on the right from the fourth column.

    `padded`: columns of even width, which only Latin text has in every editor and with every version of tabulate.
    """
    if not padded:
        rule = [":---" if index < 3 else "---:" for index in range(len(titles))]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, rule, *lines))
    from tabulate import tabulate

    align = ["left" if index < 3 else "right" for index in range(len(titles))]
    return tabulate(lines, titles, tablefmt="pipe", colalign=align, disable_numparse=True)


def format_seconds(value: float) -> str:
    """Three or four digits that matter, in a unit that suits."""
    if value >= 100:
        return f"{value:.0f} s"
    if value >= 0.1:
        return f"{value:.3g} s" if value < 1 else f"{value:.2f} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-4 else f"{value * 1e6:.3g} µs"


def peer_name(run: Run, row: Row) -> str:
    """With how torch.compile was asked for: what it makes of single blocks is another thing than of the whole."""
    name = PEER_NAMES.get(row.peer, row.peer)
    by_block = row.peer == "compile" and row.part in _REGIONAL and "--compile-regional" in run.command
    return f"{name} of each block" if by_block else name


def floor_seconds(run: Run, row: Row) -> float | None:
    """A forward whose products and whose attention each run at the best that was measured beside it, which is not in
    8 bits."""
    best: dict[str, float] = {}
    for ceiling in run.find("ceilings", size=row.size):
        kind = ceiling.what.split()[0]
        best[kind] = max(best.get(kind, 0.0), ceiling.tflops or 0.0)
    attention = row.facts.get("attention_flops")
    has_rates = all(map(best.get, ("matmul", "attention")))
    if row.peer in LOSSY_PEERS or row.flops is None or attention is None or not has_rates:
        return None
    return ((row.flops - attention) / best["matmul"] + attention / best["attention"]) / 1e12


def speedup(run: Run, row: Row) -> float | None:
    """Seconds of this peer over seconds of ours, in this run; of lossy ones the other way round, which is how much
    faster they are than ours without loss."""
    ours = next((other.median_s for other in run.find(row.part, row.what, row.size) if other.peer == "ours"), None)
    if row.peer == "ours" or ours is None or row.median_s is None:
        return None
    return ours / row.median_s if row.peer in LOSSY_PEERS else row.median_s / ours


def _floor_share(run: Run, row: Row) -> float | None:
    floor = floor_seconds(run, row)
    return floor / row.median_s if floor and row.median_s else None


def _tflops(run: Run, row: Row) -> float | None:
    """Of all forwards; the preset `fast` leaves some of them out."""
    return row.tflops if row.peer != "fast" else None


def _column_of(lossy: str) -> tuple[Callable[[Run, Row], Any], Callable[[Any], str]]:
    return lambda run, row: speedup(run, row) if row.peer == lossy else None, "{:.2f}×".format


def _fact(name: str) -> Callable[[Run, Row], Any]:
    return lambda run, row: row.facts.get(name)


_COLUMNS: dict[str, tuple[Callable[[Run, Row], Any], Callable[[Any], str]]] = {
    "what": (lambda run, row: row.what, str),
    "size": (lambda run, row: row.size, str),
    "by": (peer_name, str),
    "tokens": (_fact("tokens"), "{:,}".format),
    "mesh": (_fact("mesh"), str),
    "batch": (_fact("batch"), str),
    "devices": (_fact("devices"), str),
    "median": (lambda run, row: row.median_s, format_seconds),
    "min – max": (
        lambda run, row: row.spread_s if len(row.samples) > 1 else None,
        lambda spread: f"{format_seconds(spread[0])} – {format_seconds(spread[1])}",
    ),
    "n": (lambda run, row: len(row.samples) or None, str),
    "TFLOP/s": (_tflops, lambda value: f"{value:.0f}" if value >= 10 else f"{value:.2g}"),
    "of the floor": (_floor_share, "{:.0%}".format),
    "ours is faster": (lambda run, row: speedup(run, row) if row.peer not in LOSSY_PEERS else None, "{:.2f}×".format),
    **{f"{peer} is faster": _column_of(peer) for peer in LOSSY_PEERS},
    "error": (lambda run, row: row.error, "{:.2e}".format),
    "first call": (lambda run, row: row.first_s, format_seconds),
    "import": (_fact("import_s"), format_seconds),
    "build": (_fact("build_s"), format_seconds),
    "trace": (_fact("trace_s"), format_seconds),
    "lower": (_fact("lower_s"), format_seconds),
    "compile": (_fact("compile_s"), format_seconds),
    "programs": (_fact("programs"), str),
    "from the cache": (_fact("from_cache"), lambda value: "yes" if value else "no"),
    "FLOPs a device": (_fact("flops_per_device"), "{:.3g}".format),
    "steps": (_fact("steps"), str),
    "attention by": (_fact("sdpa"), lambda value: value.lower().removesuffix("_attention")),
    "not measured": (lambda run, row: row.failure, lambda value: value.replace("|", "\\|")[:160]),
}
"""Titles -> the value of a row, and how it is written."""
_TRANSLATED = ("from the cache",)
"""Columns whose cells are words."""
