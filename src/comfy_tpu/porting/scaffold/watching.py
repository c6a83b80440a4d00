"""A pipeline that runs under watch: what its parts were given, and what they answered."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from comfy_tpu.quiet import quiet


@dataclasses.dataclass(frozen=True)
class Call:
    given: dict[str, Any]
    """By the names of the parameters, as far as they were given."""
    result: Any


@dataclasses.dataclass
class Watched:
    """One run."""

    texts: dict[str, list[Call]] = dataclasses.field(default_factory=dict)
    """Calls of every tokenizer."""
    encoders: dict[str, list[Call]] = dataclasses.field(default_factory=dict)
    transformer: list[Call] = dataclasses.field(default_factory=list)
    steps: list[Call] = dataclasses.field(default_factory=list)
    calls_before_step: list[int] = dataclasses.field(default_factory=list)
    """How often the transformer had run when a step began."""
    set_timesteps: list[Call] = dataclasses.field(default_factory=list)
    decodes: list[Call] = dataclasses.field(default_factory=list)
    methods: dict[str, list[Call]] = dataclasses.field(default_factory=dict)
    """What the pipeline computed by its own methods, by their names."""
    sigmas: torch.Tensor | None = None
    output: torch.Tensor = dataclasses.field(default_factory=lambda: torch.zeros(0))

    def calls_by_step(self) -> Iterator[tuple[Call, list[Call]]]:
        """Every step of the scheduler, with the transformer's calls before it."""
        ranges = itertools.pairwise((0, *self.calls_before_step))
        for step, (begin, end) in zip(self.steps, ranges, strict=True):
            yield step, self.transformer[begin:end]


def bound(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    found = inspect.signature(function).bind(*args, **kwargs).arguments
    return {**{name: value for name, value in found.items() if name != "kwargs"}, **found.get("kwargs", {})}


def _kept(value: Any) -> Any:
    """Tensors as they are now: schedulers and models may write into theirs."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_kept(each) for each in value)
    if type(value) is dict:
        return {key: _kept(each) for key, each in value.items()}
    return value


@contextlib.contextmanager
def _watch(owner: Any, name: str, calls: list[Call], before: Callable[[], None] = lambda: None) -> Iterator[None]:
    original = getattr(owner, name)

    @functools.wraps(original)
    def watching(*args: Any, **kwargs: Any) -> Any:
        before()
        given = _kept(bound(original, args, kwargs))
        result = original(*args, **kwargs)
        calls.append(Call(given, _kept(result)))
        return result

    setattr(owner, name, watching)
    try:
        yield
    finally:
        delattr(owner, name)  # the instance's; the class's is there again


@contextlib.contextmanager
def _watch_tokenizer(tokenizer: Any, calls: list[Call]) -> Iterator[None]:
    """By its class: what is called is looked up there."""
    own = type(tokenizer)

    def watching(self: Any, text: Any = None, **kwargs: Any) -> Any:
        result = own.__call__(self, text, **kwargs)
        calls.append(Call({"text": text, **kwargs}, result))
        return result

    tokenizer.__class__ = type(own.__name__, (own,), {"__call__": watching})
    try:
        yield
    finally:
        tokenizer.__class__ = own


def watch(pipeline: Any, **chosen: Any) -> Watched:
    """Runs it with `chosen` and output_type="pt"."""
    watched = Watched()
    parts = pipeline.components
    with contextlib.ExitStack() as stack:
        for name, part in parts.items():
            if name.startswith("tokenizer") and part is not None:
                stack.enter_context(_watch_tokenizer(part, watched.texts.setdefault(name, [])))
            elif name.startswith("text_encoder") and part is not None:
                stack.enter_context(_watch(part, "forward", watched.encoders.setdefault(name, [])))
        stack.enter_context(_watch(parts["transformer"], "forward", watched.transformer))
        before = lambda: watched.calls_before_step.append(len(watched.transformer))  # noqa: E731
        stack.enter_context(_watch(parts["scheduler"], "step", watched.steps, before))
        stack.enter_context(_watch(parts["scheduler"], "set_timesteps", watched.set_timesteps))
        stack.enter_context(_watch(parts["vae"], "decode", watched.decodes))
        for name in dir(type(pipeline)):
            if name.startswith(("_prepare_", "_get_", "get_")) and inspect.isfunction(getattr(type(pipeline), name)):
                stack.enter_context(_watch(pipeline, name, watched.methods.setdefault(name, [])))
        stack.enter_context(quiet())
        stack.enter_context(torch.no_grad())
        answer = pipeline(**chosen, output_type="pt", return_dict=False)
    watched.output = _kept(answer[0])
    sigmas = getattr(parts["scheduler"], "sigmas", None)
    watched.sigmas = sigmas.clone() if isinstance(sigmas, torch.Tensor) else None
    return watched
