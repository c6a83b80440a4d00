"""The page itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from comfy_tpu.bridge.catalogue import Row, count_torchax_operators, overloads
from tools.aten_operators.usage import find_compared, find_used_by_families
from tools.versions import installed_versions

PACKAGES = ("torch", "torchax", "diffusers", "transformers")
KINDS = {
    "lowering": "a function on JAX arrays, torchax's",
    "decomposition": "other operators, by torch's or torchax's decomposition",
    "override": "a function on JAX arrays in `bridge/operators`, in place of torchax's or where it has none",
    "view": "a recipe in `bridge/aliasing.py`, through which writes reach the tensor it is a view of",
}

TWICE = (
    "An operator whose overloads become JAX in two ways is counted, and listed, twice. What writes into a tensor "
    "and is not listed (`aten.abs_`, `out=`) is its functional form, written back."
)
COLUMNS = (
    "*Compared*: a case in `tests/bridge/test_operators.py` or `test_views.py` asks for it, by itself or on the "
    "way, and wants torch's answer. Families are compared with diffusers as a whole besides. *Used*: asked for "
    "while the parts of a small model of the family are traced: text encoders, transformer, VAE, and what reads a"
    " given image."
)


def versions() -> dict[str, str]:
    return installed_versions(PACKAGES)


def make_page(compared: set[Row] | None = None, used: Mapping[str, set[Row]] | None = None) -> str:
    """The text of the page. `compared` and `used` (by family) are found by tracing unless they are given."""
    lowered, decomposed = count_torchax_operators()
    rows = overloads()
    compared = find_compared() if compared is None else compared
    used = find_used_by_families() if used is None else used
    aten = {row: listed for row, listed in rows.items() if row.is_aten}
    other = {row: listed for row, listed in rows.items() if not row.is_aten}
    lines = [
        "# Operators",
        "",
        "Written by `make aten-operators` from what is installed: "
        + ", ".join(f"{name} {version}" for name, version in versions().items())
        + ". Do not edit it.",
        "",
        f"torchax has lowerings for {lowered} ATen operators, and decompositions for {decomposed} more. With ours a "
        f"trace knows {len({row.name for row in aten})}, and {len(other)} other functions. How one becomes JAX:",
        "",
        *_table(
            ("kind", "what runs", "ATen operators", "others", "compared with PyTorch", *used),
            (
                (
                    kind,
                    meaning,
                    str(sum(row.kind == kind for row in aten)),
                    str(sum(row.kind == kind for row in other)),
                    str(sum(row.kind == kind for row in rows if row in compared)),
                    *(str(sum(row.kind == kind for row in rows if row in family)) for family in used.values()),
                )
                for kind, meaning in KINDS.items()
            ),
        ),
        "",
        TWICE,
        "",
        COLUMNS,
        "",
        "## ATen operators",
        "",
        *_operators(aten, compared, used),
        "",
        "## Other functions",
        "",
        "Caught before torch breaks them down into ATen operators, or not ATen's.",
        "",
        *_operators(other, compared, used),
    ]
    return "\n".join(lines) + "\n"


def read_page(text: str) -> tuple[set[Row], dict[str, set[Row]]]:
    """The operators that a page names as compared, and by family those that it names as used."""
    head, *_ = re.findall(r"^\| operator \|.*$", text, re.MULTILINE)
    families = [cell.strip() for cell in head.split("|")[5:-1]]
    compared: set[Row] = set()
    used: dict[str, set[Row]] = {family: set() for family in families}
    for line in re.findall(r"^\| `.*$", text, re.MULTILINE):
        name, _, kind, is_compared, *are_used = (cell.strip() for cell in line.split("|")[1:-1])
        row = Row(name.strip("`"), kind)  # type: ignore[arg-type]
        if is_compared:
            compared.add(row)
        for family, is_used in zip(families, are_used, strict=True):
            if is_used:
                used[family].add(row)
    return compared, used


def _operators(rows: Mapping[Row, list[str]], compared: set[Row], used: Mapping[str, set[Row]]) -> list[str]:
    return _table(
        ("operator", "overloads", "kind", "compared", *used),
        (
            (
                f"`{row.name}`",
                ", ".join(listed) or "all",
                row.kind,
                "yes" if row in compared else "",
                *("used" if row in family else "" for family in used.values()),
            )
            for row, listed in rows.items()
        ),
    )


def _table(head: Iterable[str], body: Iterable[Iterable[str]]) -> list[str]:
    head = list(head)
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body)]
