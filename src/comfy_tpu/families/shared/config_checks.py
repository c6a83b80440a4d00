"""Checks of the configurations that modules are built from."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Mapping
from typing import Any

from comfy_tpu.errors import CheckpointError, UnsupportedError


def refuse_unknown_keys(model_class: type, config: Mapping[str, Any]) -> None:
    """Raises UnsupportedError for unknown keys and CheckpointError for values of a wrong type.

    diffusers would only log unknown keys, and build another module than the trained one. It does not check values: a
    string in place of a number would fail in the middle of a run.
    """
    if unknown := sorted(set(config) - set(inspect.signature(model_class).parameters)):
        raise UnsupportedError(
            f"the configuration of {model_class.__name__} has {', '.join(unknown)}, which this version of diffusers "
            "does not know: a newer model; try `pip install --upgrade diffusers`"
        )
    _check_types(model_class, config)


def _check_types(model_class: type, config: Mapping[str, Any]) -> None:
    try:
        hints = typing.get_type_hints(inspect.unwrap(model_class.__init__))  # type: ignore[misc]
    except NameError:  # names that only type checkers import
        return
    parameters = inspect.signature(model_class).parameters
    for name in set(hints) & set(config) & set(parameters):
        value, default = config[name], parameters[name].default
        # Some defaults are not of the kind that their annotation says: None where it says float.
        usual = _matches_hint(default, hints[name]) or _json_kind(default) != _json_kind(value)
        if usual and not _matches_hint(value, hints[name]):
            raise CheckpointError(
                f"the configuration of {model_class.__name__} has {name}={repr(value)[:60]}, expected a value such as "
                f"{repr(default)[:60]}; download the model again"
            )


def _matches_hint(value: Any, hint: Any) -> bool:
    """Whether a JSON value matches a type annotation, nested values included.

    Lengths of lists are not checked, and 1 matches float: annotations are not exact about them.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_matches_hint(value, each) for each in arguments)
    if origin in (list, tuple):
        inner = [each for each in arguments if each is not Ellipsis]
        if not isinstance(value, (list, tuple)):
            return False
        return not inner or all(any(_matches_hint(each, kind) for kind in inner) for each in value)
    if origin is typing.Literal:
        return value in arguments
    kinds = {int: "number", float: "number", bool: "bool", str: "text", types.NoneType: "null", dict: "object"}
    return hint not in kinds or kinds[hint] == _json_kind(value)


def _json_kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "bool"
    kinds = {int | float: "number", str: "text", list | tuple: "list", Mapping: "object"}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), type(value).__name__)


def check_sizes(config: Mapping[str, Any], published: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a size that is no whole number from 1, or not as many as a published model has."""
    for name, usual in published.items():
        given = config.get(name, usual)
        if _is_size(usual) and not _is_size(given):
            raise _damaged_error(name, given, "a whole number")
        if isinstance(usual, tuple) and all(map(_is_size, usual)):
            fits = isinstance(given, (list, tuple)) and len(given) == len(usual) and all(map(_is_size, given))
            if not fits:
                raise _damaged_error(name, given, f"{len(usual)} whole numbers")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _damaged_error(name: str, given: object, expected: str) -> CheckpointError:
    return CheckpointError(
        f"the config.json of the transformer has {name}={repr(given)[:60]}, expected {expected}; download the model "
        "again"
    )
