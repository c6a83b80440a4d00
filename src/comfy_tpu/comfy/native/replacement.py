"""A method of a ComfyUI module that computes on the devices where it can, and as ComfyUI wrote it where it cannot."""

from __future__ import annotations

import copy
import logging
import sys
import weakref
from collections.abc import Callable, Hashable
from typing import Any, ClassVar

import torch

from comfy_tpu.comfy.native.foreign_patches import OURS, reason_in_the_module, reason_in_the_patcher
from comfy_tpu.comfy.native.hosting import Choices, Host, Part, host_of

logger = logging.getLogger(__name__)


class Replacement:
    """Stands for `module.method`, as an object patch."""

    part: ClassVar[Part]

    def __init__(self, owner: torch.nn.Module, path: str, method: str, choices: Choices) -> None:
        """`owner` is what ComfyUI loads and patches; the module is found in it by its path."""
        # Weakly: we are an attribute of the module ourselves, and ComfyUI takes a cycle for a leak.
        self._reference = weakref.ref(owner)
        self._path = path
        self._method = method
        self._choices = choices
        self._fallback = Fallback(type(self._module).__name__)

    @property
    def _owner(self) -> torch.nn.Module:
        owner = self._reference()
        assert owner is not None  # it, or a part of it, is what calls us
        return owner

    @property
    def _module(self) -> Any:
        """The one that is there now: another node may have put one in place of the one that we were made for."""
        module: Any = self._owner
        for name in filter(None, self._path.split(".")):
            module = getattr(module, name)
        return getattr(module, "_orig_mod", module)  # torch.compile's is around it

    @property
    def _own_method(self) -> Callable[..., Any]:
        return getattr(type(self._module), self._method)

    def _host(self) -> Host:
        return host_of(self._module, self._choices, self.part, self._prepare)

    @staticmethod
    def _prepare(skeleton: torch.nn.Module) -> None:
        """Before the copy of the module that is traced is."""

    def __deepcopy__(self, memo: dict[Any, Any]) -> Replacement:
        from comfy_tpu.compiler.hosted import SKELETON

        if SKELETON in memo:
            return self  # a skeleton is copied while we are on the module, and does not use us
        return type(self)(copy.deepcopy(self._owner, memo), self._path, self._method, self._choices)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Where torch.compile is in use it follows whatever a model calls, and this is nothing for it. Its import takes
        # seconds, which are not spent where it is not.
        decide = torch.compiler.disable(self._decide) if "torch._dynamo" in sys.modules else self._decide
        return decide(*args, **kwargs)

    def _decide(self, *args: Any, **kwargs: Any) -> Any:
        if reason := self._reason_against(*args, **kwargs):
            self._fallback.explain(reason)
        else:
            kind = self._kind(*args, **kwargs)
            traced, result = self._fallback.attempt(kind, lambda: self._on_devices(*args, **kwargs))
            if traced:
                return result
        return self._own_method(self._module, *args, **kwargs)

    def _reason_against(self, *args: Any, **kwargs: Any) -> str:
        """Why this call cannot be traced, or nothing."""
        return reason_in_the_patcher(self._owner) or reason_in_the_module(self._module)

    def _kind(self, *args: Any, **kwargs: Any) -> Hashable:
        """Calls of one kind are traced alike: what fails for one fails for all."""
        raise NotImplementedError

    def _on_devices(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


setattr(Replacement, OURS, True)
Replacement.__call__._torchdynamo_disable = True  # type: ignore[attr-defined]  # it is not followed in here, either


class Fallback:
    """Remembers what cannot be traced, and says so, once for each reason."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._said: set[str] = set()
        self._refused: set[Hashable] = set()

    def explain(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("%s runs without the TPU: %s", self._what, reason)

    def attempt(self, kind: Hashable, run: Callable[[], Any]) -> tuple[bool, Any]:
        """Whether it could be traced, and its result. What failed once is not traced again."""
        from comfy_tpu.errors import MissingOperatorError, StackingError, TraceError, UnsupportedError

        if kind in self._refused:
            return False, None
        try:
            return True, run()
        except (TraceError, UnsupportedError, MissingOperatorError, StackingError) as error:
            self._refused.add(kind)
            self.explain(str(error))
            return False, None
