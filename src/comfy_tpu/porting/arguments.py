"""What a function's arguments are worth: where nobody was seen to call it, and where a call leaves them out."""

from __future__ import annotations

import ast
import dataclasses
import re

from comfy_tpu.porting.source import Definition
from comfy_tpu.porting.values import SEVERAL_TRACED, TRACED, UNKNOWN, Value, constant


def expected_arguments(definition: Definition, owner: Definition | None) -> dict[str, Value]:
    """Of a function that nobody was seen to call: from annotations, defaults and names."""
    assert not isinstance(definition.node, ast.ClassDef)
    arguments = definition.node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    values = {}
    for argument, default in [
        *zip(positional, defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]:
        values[argument.arg] = _expected(argument, default)
    if owner is not None and positional:
        values[positional[0].arg] = Value(instance=owner)
    return values


def _expected(argument: ast.arg, default: ast.expr | None) -> Value:
    if argument.annotation is not None:
        text = ast.unparse(argument.annotation).strip("'\"")
        if "Tensor" not in text:
            return UNKNOWN
        if any(word in text for word in ("list[", "tuple[", "List[", "Tuple[")):
            return SEVERAL_TRACED
        if any(word in text for word in ("dict", "Dict")):
            return UNKNOWN
        return dataclasses.replace(TRACED, is_mask="mask" in argument.arg)
    if default is None and not _NUMBERS.search(argument.arg):
        return dataclasses.replace(TRACED, is_mask="mask" in argument.arg)
    return UNKNOWN


_NUMBERS = re.compile(
    r"^(num|n|is|use|max|min)_|_?(size|sizes|dim|dims|dtype|device|height|width|shape|length|config|cfg|partition)$"
)
"""Names of arguments that are hardly tensors, where nothing says what they are."""


def default_arguments(arguments: ast.arguments) -> dict[str, Value]:
    """What arguments are that a call leaves out."""
    positional = [*arguments.posonlyargs, *arguments.args]
    given = [*positional[len(positional) - len(arguments.defaults) :], *arguments.kwonlyargs]
    bound = dict.fromkeys((each.arg for each in (*positional, *arguments.kwonlyargs)), UNKNOWN)
    for argument, default in zip(given, (*arguments.defaults, *arguments.kw_defaults), strict=True):
        if isinstance(default, ast.Constant):
            bound[argument.arg] = constant(default.value)
    return bound
