"""A run of a small pipeline, with every call of its parts: what they were given, and what they returned."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from comfy_tpu.quiet import quiet


@dataclasses.dataclass(frozen=True)
class Call:
    given: dict[str, Any]
    """Arguments by the names of the parameters."""
    result: Any

    @property
    def tensor(self) -> torch.Tensor:
        """The first tensor of the result."""
        if isinstance(self.result, torch.Tensor):
            return self.result
        results = self.result if isinstance(self.result, (tuple, list)) else self.result.values()
        first: torch.Tensor = next(iter(results))
        return first


@dataclasses.dataclass
class PipelineRun:
    """Sizes of a run, in which nothing is as large as something else, and the calls."""

    prompt: str
    negative_prompt: str
    height: int
    """Rows of latents."""
    width: int
    num_frames: int
    steps: int
    texts: dict[str, list[Call]] = dataclasses.field(default_factory=dict)
    """Calls of every tokenizer."""
    encoders: dict[str, list[Call]] = dataclasses.field(default_factory=dict)
    transformer: list[Call] = dataclasses.field(default_factory=list)
    scheduler: list[Call] = dataclasses.field(default_factory=list)
    """Calls of its `step`."""
    calls_before_step: list[int] = dataclasses.field(default_factory=list)
    """How often the transformer had run when a step began."""
    set_timesteps: list[Call] = dataclasses.field(default_factory=list)
    decodes: list[Call] = dataclasses.field(default_factory=list)
    methods: dict[str, list[Call]] = dataclasses.field(default_factory=dict)
    """Calls of the pipeline's own methods, by their names."""
    noise: torch.Tensor | None = None
    """The latents of the start, [1, channels, frames, height, width], where they were given."""
    sigmas: torch.Tensor | None = None
    output: torch.Tensor = dataclasses.field(default_factory=lambda: torch.zeros(0))

    def calls_by_step(self) -> Iterator[tuple[Call, list[Call]]]:
        """Every step of the scheduler, with the transformer's calls before it."""
        ranges = itertools.pairwise((0, *self.calls_before_step))
        for step, (begin, end) in zip(self.scheduler, ranges, strict=True):
            yield step, self.transformer[begin:end]

    def record(self, pipeline: Any, **options: Any) -> None:
        """Runs the pipeline with `options` and output_type="pt"."""
        parts = pipeline.components
        with contextlib.ExitStack() as stack:
            for name, part in parts.items():
                if name.startswith("tokenizer") and part is not None:
                    stack.enter_context(_record_tokenizer(part, self.texts.setdefault(name, [])))
                elif name.startswith("text_encoder") and part is not None:
                    stack.enter_context(_record_calls(part, "forward", self.encoders.setdefault(name, [])))
            before = lambda: self.calls_before_step.append(len(self.transformer))  # noqa: E731
            stack.enter_context(_record_calls(parts["transformer"], "forward", self.transformer))
            stack.enter_context(_record_calls(parts["scheduler"], "step", self.scheduler, before))
            stack.enter_context(_record_calls(parts["scheduler"], "set_timesteps", self.set_timesteps))
            stack.enter_context(_record_calls(parts["vae"], "decode", self.decodes))
            for name, _ in inspect.getmembers(type(pipeline), inspect.isfunction):
                if name.startswith(("_prepare_", "_get_", "get_")):
                    stack.enter_context(_record_calls(pipeline, name, self.methods.setdefault(name, [])))
            stack.enter_context(quiet())
            stack.enter_context(torch.no_grad())
            answer = pipeline(**options, output_type="pt", return_dict=False)
        self.output = _copy_tensors(answer[0])
        sigmas = getattr(parts["scheduler"], "sigmas", None)
        self.sigmas = sigmas.clone() if isinstance(sigmas, torch.Tensor) else None


def _copy_tensors(value: Any) -> Any:
    """Tensors as they are now: schedulers and models may write into theirs."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_copy_tensors(each) for each in value)
    if type(value) is dict:
        return {key: _copy_tensors(each) for key, each in value.items()}
    return value


@contextlib.contextmanager
def _record_calls(
    owner: Any, name: str, calls: list[Call], before: Callable[[], None] = lambda: None
) -> Iterator[None]:
    original = getattr(owner, name)

    @functools.wraps(original)
    def call_and_record(*args: Any, **kwargs: Any) -> Any:
        before()
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        unnamed = given.pop("kwargs", {})
        given = _copy_tensors({**given, **unnamed})
        result = original(*args, **kwargs)
        calls.append(Call(given, _copy_tensors(result)))
        return result

    setattr(owner, name, call_and_record)
    try:
        yield
    finally:
        delattr(owner, name)  # the instance's; the class's is there again


@contextlib.contextmanager
def _record_tokenizer(tokenizer: Any, calls: list[Call]) -> Iterator[None]:
    """Replaces the tokenizer's class, where Python looks up `__call__`."""
    own = type(tokenizer)

    def call_and_record(self: Any, text: Any = None, **kwargs: Any) -> Any:
        result = own.__call__(self, text, **kwargs)
        calls.append(Call({"text": text, **kwargs}, result))
        return result

    tokenizer.__class__ = type(own.__name__, (own,), {"__call__": call_and_record})
    try:
        yield
    finally:
        tokenizer.__class__ = own
