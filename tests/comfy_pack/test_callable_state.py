"""What makes two callables the same program, and what makes one unfit for any. Needs no ComfyUI."""

import functools
import itertools
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from comfy_tpu.comfy.native.callable_state import code_identity, read_state
from comfy_tpu.errors import UnsupportedError

SETTINGS: dict[str, float] = {"scale": 1.0}
COUNT = 0


def key(*callables: Any) -> Any:
    found = read_state(callables).key
    hash(found)
    return found


def make(factor: Any) -> Callable[..., Any]:
    def patch(h: Any, options: Any) -> Any:
        return h * factor

    return patch


@pytest.mark.parametrize(
    "factor", [2, 2.0, "a", None, (1, [2]), {"a": {1, 2}}, torch.float16, slice(1, 2), float("nan")]
)
def test_equal_values_are_the_same_and_others_are_not(factor: Any) -> None:
    assert key(make(factor)) == key(make(factor))
    assert key(make(factor)) != key(make([factor]))
    assert code_identity(make(factor)) == code_identity(make(0))


def test_types_of_equal_numbers_count() -> None:
    assert len({key(make(value)) for value in (1, 1.0, True, 0.0, -0.0)}) == 5


def test_the_same_values_in_other_code_are_something_else() -> None:
    assert key(lambda h: h) != key(lambda h: h)


def uses_settings(h: Any) -> Any:
    return h * SETTINGS["scale"]


def uses_a_function(h: Any) -> Any:
    return uses_settings(h)


@pytest.mark.parametrize("function", [uses_settings, uses_a_function])
def test_globals_are_part_of_it(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(function)
    monkeypatch.setitem(SETTINGS, "scale", 2.0)
    assert key(function) != before
    monkeypatch.undo()
    assert key(function) == before


class Patch:
    gain = 1.0

    def __init__(self, strength: float) -> None:
        self.strength = strength
        self.seen: list[int] = []

    def __call__(self, h: Any, options: Any) -> Any:
        return self.scale(h)

    def scale(self, h: Any) -> Any:
        return h * self.strength * self.gain


def test_objects_are_compared_by_their_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert key(Patch(0.5)) == key(Patch(0.5))
    assert key(Patch(0.5)) != key(Patch(0.6))
    assert key(Patch(0.5).scale) == key(Patch(0.5).scale)
    before = key(Patch(0.5))
    monkeypatch.setattr(Patch, "gain", 2.0)
    assert key(Patch(0.5)) != before


def test_partials_and_defaults() -> None:
    assert key(functools.partial(make, 1)) == key(functools.partial(make, 1)) != key(functools.partial(make, 2))

    def with_default(value: float) -> Any:
        return lambda h, scale=value: h * scale

    assert key(with_default(1.0)) == key(with_default(1.0)) != key(with_default(2.0))


def counts(h: Any) -> Any:
    global COUNT
    COUNT += 1
    return h


def test_whatever_was_changed_is_put_back() -> None:
    calls, seen, settings, patch = 0, [1], {"a": [2]}, Patch(1.0)

    def change(h: Any) -> Any:
        nonlocal calls
        calls += 1
        seen.append(calls)
        settings["b"] = settings.pop("a")
        patch.strength = 2.0
        return counts(h)

    state = read_state([change])
    change(1)
    assert read_state([change]).key != state.key
    state.restore()
    assert read_state([change]).key == state.key
    assert (calls, seen, settings, patch.strength, COUNT) == (0, [1], {"a": [2]}, 1.0, 0)


def test_what_refers_to_itself() -> None:
    loop: list[Any] = [1]
    loop.append(loop)

    def again(n: int) -> int:
        return again(n - 1) if n else len(loop)

    assert key(again) == key(again)


GENERATOR = random.Random(1)
NUMBERS = itertools.count()


def imports(h: Any) -> Any:
    import secrets

    return h * secrets.randbelow(2)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda h: h * time.time(), "it uses time"),
        (lambda h: h * random.random(), "it uses random"),
        (lambda h: h * GENERATOR.random(), "a random.Random, whose state cannot be compared"),
        (lambda h: h * next(NUMBERS), "itertools.count"),
        (lambda h: globals() and h, "calls globals"),
        (lambda h: eval("h"), "calls eval"),
        (imports, "imports secrets"),
        (make(torch.ones(1)), "holds tensors of its own"),
        (make(torch.nn.Linear(1, 1)), "holds modules of its own"),
        (make(threading.Lock()), "lock"),
        (make(x for x in (1,)), "generator"),
        (make([0] * 10 + [[n] for n in range(3000)]), "more than 2000"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_may_be_different_at_every_call(function: Any, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        read_state([function])
