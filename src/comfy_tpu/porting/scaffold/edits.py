"""Lines put into files that are there already: at a place that is found once, or not at all."""

from __future__ import annotations

import ast
import re

from comfy_tpu.errors import UnsupportedError


def inserted_before(text: str, anchor: str, addition: str, *, where: str) -> str:
    """`anchor`: a pattern that is found exactly once, from the beginning of a line."""
    found = list(re.finditer(anchor, text, flags=re.MULTILINE))
    if len(found) != 1:
        raise UnsupportedError(
            f"{where} has {len(found)} places like {anchor!r}, expected one to write before; is this checkout another "
            "version? Nothing was written"
        )
    at = found[0].start()
    return text[:at] + addition + text[at:]


def appended_to_tuple(text: str, name: str, item: str, *, where: str) -> str:
    """To the tuple or list that a module gives this name."""
    for node in ast.parse(text).body:
        target = (
            node.target
            if isinstance(node, ast.AnnAssign)
            else node.targets[0]
            if isinstance(node, ast.Assign)
            else None
        )
        if isinstance(target, ast.Name) and target.id == name and isinstance(node, (ast.Assign, ast.AnnAssign)):
            value = node.value
            if isinstance(value, (ast.Tuple, ast.List)) and value.end_lineno is not None:
                lines = text.splitlines(keepends=True)
                last, column = value.end_lineno - 1, (value.end_col_offset or 1) - 1
                before = lines[last][:column].rstrip()
                comma = "" if not value.elts or before.endswith((",", "(", "[")) or not before else ", "
                if not before and value.elts and not lines[last - 1].rstrip().endswith(","):
                    comma = ", "
                end = "," if isinstance(value, ast.Tuple) and (not value.elts or not before) else ""
                lines[last] = f"{lines[last][:column]}{comma}{item}{end}{lines[last][column:]}"
                return "".join(lines)
    raise UnsupportedError(
        f"{where} has no tuple {name} to add to; is this checkout another version? Nothing was written"
    )


def sorted_into_list(text: str, name: str, item: str, *, where: str) -> str:
    """Into the list of texts that a module gives this name, which is in the order of the alphabet."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            values = ast.literal_eval(node.value)
            source = ast.get_source_segment(text, node.value)
            assert source is not None
            ordered = sorted([*values, item])
            written = "[\n" + "".join(f'    "{each}",\n' for each in ordered) + "]"
            return text.replace(source, written, 1)
    raise UnsupportedError(
        f"{where} has no list {name} to add to; is this checkout another version? Nothing was written"
    )
