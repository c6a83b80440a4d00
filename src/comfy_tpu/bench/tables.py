"""A run as Markdown tables, made from its rows alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
}
_REGIONAL = ("transformer", "accuracy", "end-to-end")
"""Parts in which `--compile-regional` means something."""

Cell = Callable[[Run, Row], str]


def make_table(found: Sequence[tuple[Run, Row]]) -> str:
    """Rows, each with the run that it is compared within; columns that nothing fills are left out."""
    cells = {title: [cell(run, row) for run, row in found] for title, cell in _COLUMNS.items()}
    shown = {title: column for title, column in cells.items() if any(column)}
    return render([*shown], [list(line) for line in zip(*shown.values(), strict=True)])


def render(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, numbers on the right from the fourth column."""
    from tabulate import tabulate

    align = ["left" if index < 3 else "right" for index in range(len(titles))]
    return tabulate(lines, titles, tablefmt="pipe", colalign=align, disable_numparse=True)


def seconds(value: float) -> str:
    """Three or four digits that matter, in a unit that suits."""
    if value >= 100:
        return f"{value:.0f} s"
    if value >= 0.1:
        return f"{value:.3g} s" if value < 1 else f"{value:.2f} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-4 else f"{value * 1e6:.3g} µs"


def floor_seconds(run: Run, row: Row) -> float | None:
    """A forward whose products and whose attention each run at the best that was measured beside it, which is not in
    8 bits."""
    if row.peer == "fp8":
        return None
    best: dict[str, float] = {}
    for ceiling in run.find("ceilings", size=row.size):
        kind = ceiling.what.split()[0]
        best[kind] = max(best.get(kind, 0.0), ceiling.tflops or 0.0)
    attention = row.facts.get("attention_flops")
    if row.flops is None or attention is None or not best.get("matmul") or not best.get("attention"):
        return None
    return ((row.flops - attention) / best["matmul"] + attention / best["attention"]) / 1e12


def speedup(run: Run, row: Row) -> float | None:
    """Seconds of this peer over seconds of ours, in this run."""
    ours = _ours_s(run, row)
    return None if ours is None or row.median_s is None or row.peer in ("ours", "fp8") else row.median_s / ours


def quantized_speedup(run: Run, row: Row) -> float | None:
    """Seconds of ours without quantization over seconds of fp8, in this run."""
    ours = _ours_s(run, row)
    return None if ours is None or row.median_s is None or row.peer != "fp8" else ours / row.median_s


def _ours_s(run: Run, row: Row) -> float | None:
    rows = run.find(row.part, what=row.what, size=row.size)
    return next((other.median_s for other in rows if other.peer == "ours"), None)


def peer_name(run: Run, row: Row) -> str:
    """With how torch.compile was asked for: what it makes of single blocks is another thing than of the whole."""
    name = PEER_NAMES.get(row.peer, row.peer)
    by_block = row.peer == "compile" and row.part in _REGIONAL and "--compile-regional" in run.command
    return f"{name} of each block" if by_block else name


def _spread(run: Run, row: Row) -> str:
    return f"{seconds(row.spread_s[0])} – {seconds(row.spread_s[1])}" if row.spread_s and len(row.samples) > 1 else ""


def _floor(run: Run, row: Row) -> str:
    floor = floor_seconds(run, row)
    return f"{floor / row.median_s:.0%}" if floor and row.median_s else ""


def _fact(name: str, write: Callable[[Any], str]) -> Cell:
    def cell(run: Run, row: Row) -> str:
        value = row.facts.get(name)
        return "" if value is None else write(value)

    return cell


def _tflops(run: Run, row: Row) -> str:
    return f"{row.tflops:.0f}" if row.tflops and row.tflops >= 10 else f"{row.tflops:.2g}" if row.tflops else ""


def _optional(value: float | None, write: Callable[[float], str]) -> str:
    return "" if value is None else write(value)


_COLUMNS: dict[str, Cell] = {
    "what": lambda run, row: row.what,
    "size": lambda run, row: row.size,
    "by": peer_name,
    "tokens": _fact("tokens", lambda value: f"{value:,}"),
    "mesh": _fact("mesh", str),
    "batch": _fact("batch", str),
    "devices": _fact("devices", str),
    "median": lambda run, row: _optional(row.median_s, seconds),
    "min – max": _spread,
    "n": lambda run, row: str(len(row.samples)) if row.samples else "",
    "TFLOP/s": _tflops,
    "of the floor": _floor,
    "ours is faster": lambda run, row: _optional(speedup(run, row), lambda value: f"{value:.2f}×"),
    "fp8 is faster": lambda run, row: _optional(quantized_speedup(run, row), lambda value: f"{value:.2f}×"),
    "error": lambda run, row: _optional(row.error, lambda value: f"{value:.2e}"),
    "first call": lambda run, row: _optional(row.first_s, seconds),
    "import": _fact("import_s", seconds),
    "build": _fact("build_s", seconds),
    "trace": _fact("trace_s", seconds),
    "lower": _fact("lower_s", seconds),
    "compile": _fact("compile_s", seconds),
    "programs": _fact("programs", str),
    "from the cache": _fact("from_cache", lambda value: "yes" if value else "no"),
    "FLOPs a device": _fact("flops_per_device", lambda value: f"{value:.3g}"),
    "steps": _fact("steps", str),
    "attention by": _fact("sdpa", lambda value: value.lower().removesuffix("_attention")),
    "not measured": lambda run, row: (row.failure or "").replace("|", "\\|")[:160],
}
