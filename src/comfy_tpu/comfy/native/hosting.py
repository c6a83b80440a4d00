"""Modules of ComfyUI on our devices: one `HostedModule` each, shared by everything that uses the module."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import comfy.model_management
import torch
from comfy_execution.utils import get_executing_context

from comfy_tpu.comfy.native.foreign_patches import structure
from comfy_tpu.comfy.run import NodeReport, start
from comfy_tpu.comfy.unloading import register_with_comfyui
from comfy_tpu.pipeline.progress import Progress

if TYPE_CHECKING:
    from comfy_tpu.compiler.component import ComponentSpec
    from comfy_tpu.compiler.hosted import HostedModule
    from comfy_tpu.compiler.program import ProgramEvent

Part = Literal["transformer", "text_encoder", "vae"]
"""What a module is in a model, as our families call it."""


@dataclasses.dataclass(frozen=True)
class Choices:
    """What the inputs of a TPU Compile node say."""

    mesh: str = "auto"
    precision: str = "auto"
    attention: str = "auto"


class Host:
    """A module on the devices, for the node that runs now."""

    def __init__(
        self, module: torch.nn.Module, choices: Choices, part: Part, prepare: Callable[[torch.nn.Module], None]
    ) -> None:
        from comfy_tpu.compiler.hosted import HostedModule
        from comfy_tpu.compiler.residency import shared_residency
        from comfy_tpu.config import AttentionConfig
        from comfy_tpu.parallel.mesh import make_placement

        placement = make_placement(choices.mesh)
        on_cpu = placement.platform == "cpu"
        wanted = choices.precision if choices.precision != "auto" else "float32" if on_cpu else "bfloat16"
        self.dtype: torch.dtype = getattr(torch, wanted)
        self.size = ""
        """What is being computed, for the line that says so."""
        self._name = type(module).__name__
        self._report: NodeReport | None = None
        self._step: int | None = None
        self._hosted: HostedModule = HostedModule(
            module,
            name=self._name,
            placement=placement,
            dtype=self.dtype,
            attention=AttentionConfig(implementation=choices.attention),  # type: ignore[arg-type]
            residency=shared_residency(),
            tables=[spec.rules for spec in _components() if spec.name.startswith(part)],
            prepare=lambda skeleton: _prepare(skeleton, prepare),
            varying=frozenset({"block_index"}),  # for patches, with which nothing is traced
            on_event=self._on_event,
            on_load=lambda done, total: self._tell(Progress("loading", self._name, done, total)),
        )

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`function(module, …)` on the devices. ComfyUI's own errors come out where it has one for the case."""
        from comfy_tpu.errors import DeviceMemoryError

        comfy.model_management.throw_exception_if_processing_interrupted()
        start()
        register_with_comfyui()
        self._report = _report()
        try:
            return self._hosted(function, *args, **kwargs)
        except DeviceMemoryError as error:
            # ComfyUI decodes in tiles where it sees its own out-of-memory error, and unloads models.
            raise comfy.model_management.OOM_EXCEPTION(str(error)) from error

    @staticmethod
    def fetch(results: Any) -> Any:
        """Host tensors of what a call with `fetch=False` left on the devices."""
        from comfy_tpu.bridge import to_host

        return to_host(results)

    def release(self) -> None:
        """The devices' memory; the programs go with this object."""
        self._hosted.release()

    def begin_step(self, index: int, total: int) -> None:
        """Before a call of a sampler's step. Several calls may belong to one; the first announces it."""
        if total and index != self._step:
            self._report = _report()
            self._tell(Progress("denoising", "", index, total, size=self.size))
        self._step = index

    def end_steps(self) -> None:
        """The sampler is done, or was ended."""
        self._step = None

    def _on_event(self, event: ProgramEvent) -> None:
        if event.stage in ("compiling", "ready"):
            done = int(event.stage == "ready")
            self._tell(Progress("compiling", event.program, done, 1, size=self.size, from_cache=event.from_cache))

    def _tell(self, progress: Progress) -> None:
        if self._report is not None:
            self._report(progress)


def _report() -> NodeReport:
    context = get_executing_context()
    return NodeReport(context.node_id if context else None)


_hosts: weakref.WeakKeyDictionary[torch.nn.Module, dict[tuple[Choices, Hashable], Host]] = weakref.WeakKeyDictionary()
_lock = threading.RLock()
_KEPT = 3
"""Structures of a module whose programs are kept: a node that changes it anew at every run must not fill the memory."""


def host_of(module: torch.nn.Module, choices: Choices, part: Part, prepare: Callable[[torch.nn.Module], None]) -> Host:
    """The same for every clone of a model: they share the module, its programs and its place on the devices.

    Another one where the module is made of something else than before: its programs would not be right.
    """
    key = (choices, structure(module))
    with _lock:
        hosts = _hosts.setdefault(module, {})
        if key not in hosts:
            older = [each for each in hosts if each[0] == choices]
            for each in older[: len(older) - _KEPT + 1]:
                hosts.pop(each).release()
            hosts[key] = Host(module, choices, part, prepare)
        return hosts[key]


def end_steps(module: torch.nn.Module) -> None:
    """A sampler of the module is done, or was ended."""
    for host in _hosts.get(module, {}).values():
        host.end_steps()


def _prepare(skeleton: torch.nn.Module, more: Callable[[torch.nn.Module], None]) -> None:
    part: Any
    for part in skeleton.modules():
        if hasattr(part, "comfy_cast_weights"):
            # ComfyUI's layers then cast their weights to what they are given, so that any mixture of dtypes computes.
            part.comfy_cast_weights = True
            part.weight_function, part.bias_function = [], []
        if hasattr(part, "_full_precision_mm"):
            part._full_precision_mm = True  # with 8-bit weights: what they multiply stays as it is
    more(skeleton)


def _components() -> Iterator[ComponentSpec]:
    from comfy_tpu.families.registry import load_families

    for family in load_families():
        yield from family.components
