"""Replaces a method of a ComfyUI module: runs on the devices if it can be traced, else as ComfyUI wrote it."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, ClassVar

import comfy.model_management
import torch
from comfy_execution.utils import get_executing_context

from comfy_tpu.comfy.fallbacks import NodeRun
from comfy_tpu.comfy.native.foreign_patches import OWN_MARKER, find_module_problem, find_patcher_problem
from comfy_tpu.comfy.native.hosting import Choices, CodeChangedError, Host, Part, find_host
from comfy_tpu.comfy.routes import send_status
from comfy_tpu.comfy.status import STATUS

logger = logging.getLogger(__name__)


class Replacement:
    """An object patch that replaces `module.method`. Subclasses override `_kind` and `_run_on_devices`."""

    part: ClassVar[Part]

    def __init__(self, owner: torch.nn.Module, path: str, method: str, choices: Choices) -> None:
        """`owner`: the module that ComfyUI loads and patches; `path`: the path of the replaced module in it."""
        # Weakly: we are an attribute of the module ourselves, and ComfyUI takes a cycle for a leak.
        self._reference = weakref.ref(owner)
        self._path = path
        self._method = method
        self._choices = choices
        self._fallback = Fallback(type(self._module).__name__, current_run().node)
        self._last: tuple[Hashable, weakref.ref[Host]] | None = None
        """Of the last call that ran on the devices: its kind, in which run of which node, and its host."""

    @property
    def _owner(self) -> torch.nn.Module:
        owner = self._reference()
        assert owner is not None  # it, or a part of it, is what calls us
        return owner

    @property
    def _module(self) -> Any:
        """The current module at `path`: another node may have replaced the original one."""
        module: Any = self._owner
        for name in filter(None, self._path.split(".")):
            module = getattr(module, name)
        return getattr(module, "_orig_mod", module)  # torch.compile's is around it

    @property
    def _own_method(self) -> Callable[..., Any]:
        return getattr(type(self._module), self._method)

    def _find_host(self) -> Host:
        return find_host(self._module, self._choices, self.part, self._prepare, self._title())

    def _title(self) -> str:
        """The model's name as people know it; empty: that of the module's class."""
        return ""

    @staticmethod
    def _prepare(skeleton: torch.nn.Module) -> None:
        """Changes the skeleton before it is traced; subclasses may override it."""

    def __deepcopy__(self, memo: dict[Any, Any]) -> Replacement:
        from comfy_tpu.compiler.hosted import SKELETON

        if SKELETON in memo:
            return self  # a skeleton is copied while we are on the module, and does not use us
        return type(self)(copy.deepcopy(self._owner, memo), self._path, self._method, self._choices)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Where torch.compile is in use it follows whatever a model calls, and this is nothing for it. Its import takes
        # seconds, which are not spent where it is not.
        run = (
            torch.compiler.disable(self._run_or_fall_back) if "torch._dynamo" in sys.modules else self._run_or_fall_back
        )
        return run(*args, **kwargs)

    def _run_or_fall_back(self, *args: Any, **kwargs: Any) -> Any:
        try:
            result = self._run(args, kwargs)
        except OnHostError as error:
            self._last = None
            self._fallback.explain(str(error))
            refuse_large(self._module, _find_device(args, kwargs), str(error), self._choices)
            return self._own_method(self._module, *args, **kwargs)
        self._fallback.clear()
        return _move(result, _find_device(args, kwargs))

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result from the devices; raises OnHostError if they cannot compute it."""
        with unforeseen_errors():
            _raise_reason(self._find_problem(*args, **kwargs))
            kind = self._kind(*args, **kwargs)
        host = self._last[1]() if self._last is not None and self._last[0] == (kind, current_run()) else None
        if host is not None:
            with contextlib.suppress(CodeChangedError), host.checking_meanwhile(lambda: self._check_code(host)):
                return self._attempt(lambda: host, kind, args, kwargs)
        with unforeseen_errors():
            _raise_reason(find_module_problem(self._module))
        self._last = None
        return self._attempt(self._find_host, kind, args, kwargs)

    def _attempt(
        self, find_host: Callable[[], Host], kind: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """`find_host` may fail, as tracing may."""

        def run() -> Any:
            host = find_host()
            result = self._run_on_devices(host, *args, **kwargs)
            self._last = (kind, current_run()), weakref.ref(host)
            return result

        return self._fallback.attempt(kind, run)

    def _check_code(self, host: Host) -> None:
        """Raises CodeChangedError if the module is not what `host` runs any more.

        It looks at two thousand modules, which takes 40 to 110 ms, as long as a step of SDXL: within a run it is done
        while the devices compute, because hardly ever has anything changed.
        """
        if find_module_problem(self._module) or self._find_host() is not host:
            raise CodeChangedError

    def _find_problem(self, *args: Any, **kwargs: Any) -> str:
        """Why this call cannot be traced, as far as that is quickly said; empty if it can."""
        return find_patcher_problem(self._owner)

    def _kind(self, *args: Any, **kwargs: Any) -> Hashable:
        """A key for calls that are traced alike: if one of them cannot be traced, none can."""
        raise NotImplementedError

    def _run_on_devices(self, host: Host, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def _find_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Where ComfyUI computes: on its own GPU, or on the CPU."""
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    return next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), torch.device("cpu"))


def _move(result: Any, device: torch.device) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), result)


setattr(Replacement, OWN_MARKER, True)
Replacement.__call__._torchdynamo_disable = True  # type: ignore[attr-defined]  # it is not followed in here, either


class Fallback:
    """Records which calls cannot be traced: warns once for each reason, and shows it on the node that runs."""

    def __init__(self, name: str, compile_node: str | None = None) -> None:
        """`compile_node`: the id of the TPU Compile node that made the replacement."""
        self._name = name
        self._compile_node = compile_node
        self._explained: set[str] = set()
        self._refused: dict[Hashable, str] = {}

    def explain(self, reason: str) -> None:
        if reason not in self._explained:
            self._explained.add(reason)
            logger.warning("%s runs without the TPU: %s", self._name, reason)
        if STATUS.fallbacks.record(current_run(), self._name, reason, self._compile_node):
            send_status(immediately=True)

    def clear(self) -> None:
        """Takes the reason off the node that runs: it computes on the devices."""
        if STATUS.fallbacks.clear(current_run(), self._name):
            send_status(immediately=True)

    def attempt(self, kind: Hashable, run: Callable[[], Any]) -> Any:
        """The result of a call; raises OnHostError if it cannot be traced. A kind that failed once is not traced
        again."""
        if kind in self._refused:
            raise OnHostError(self._refused[kind])
        try:
            with unforeseen_errors():
                return run()
        except OnHostError as error:
            self._refused[kind] = str(error)
            raise


class OnHostError(Exception):
    """A call must run without the devices; the text is the reason."""


@contextlib.contextmanager
def unforeseen_errors() -> Iterator[None]:
    """Turns exceptions into OnHostError, except for those that ComfyUI or the user must see: a cancelled run, memory
    that ran out, a choice that does not exist."""
    from comfy_tpu.errors import ComfyTpuError, HostsError, InvalidValueError

    passing = (InvalidValueError, HostsError, CodeChangedError, OnHostError)
    try:
        yield
    except (*passing, comfy.model_management.InterruptProcessingException, comfy.model_management.OOM_EXCEPTION):
        raise
    except ComfyTpuError as error:
        raise OnHostError(str(error)) from error
    except Exception as error:
        logger.debug("an unforeseen error", exc_info=True)
        raise OnHostError(f"{type(error).__name__}: {error}") from error


def _raise_reason(reason: str) -> None:
    """Raises OnHostError for a reason that is not empty."""
    if reason:
        raise OnHostError(reason)


LARGE = 1_000_000_000
"""Parameters of a module that takes a CPU minutes: a step of a transformer, or a prompt of a text encoder."""
_ALLOWED = "COMFY_TPU_CPU_FALLBACK"


def refuse_large(module: torch.nn.Module, device: torch.device, reason: str, choices: Choices) -> None:
    """Raises UnsupportedError if a large module would run on the CPU for this reason, and nobody allowed that."""
    from comfy_tpu.errors import UnsupportedError

    if device.type != "cpu" or choices.cpu_fallback or os.environ.get(_ALLOWED) == "1":
        return
    count = sum(weight.numel() for weight in module.parameters())
    if count > LARGE:
        raise UnsupportedError(
            f"{type(module).__name__} cannot run on the TPU: {reason}. On the CPU its {count / 1e9:.1f} billion "
            "parameters take minutes for each prompt or step; to run it there all the same, turn on cpu_fallback in "
            f"TPU Options, or start ComfyUI with {_ALLOWED}=1"
        )


def current_run() -> NodeRun:
    """The node that ComfyUI executes now."""
    context = get_executing_context()
    return NodeRun(context.node_id, context.prompt_id) if context else NodeRun()
