"""docs/aten-operators.md is what its tool writes."""

from pathlib import Path

from comfy_tpu.bridge.catalogue import overloads
from tests.pins import only_with_the_pinned
from tools.aten_operators.page import make_page, versions

ROOT = Path(__file__).parents[2]


@only_with_the_pinned(versions())
def test_the_page_is_what_its_tool_writes() -> None:
    written = (ROOT / "docs" / "aten-operators.md").read_text(encoding="utf-8")
    assert make_page() == written, "docs/aten-operators.md is stale; run `make aten-operators`"


def test_no_operator_is_listed_twice_in_one_way() -> None:
    rows = list(overloads())
    assert len(rows) == len(set(rows))
    decomposed_anyway = {row.name for row, listed in overloads().items() if row.kind == "decomposition" and not listed}
    others = {row.name for row in rows if row.kind != "decomposition"}
    assert decomposed_anyway & others == set()
