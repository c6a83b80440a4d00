"""Runs ComfyUI's modules on our devices: one `HostedModule` per module, shared by all clones of a model."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import comfy.model_management
import torch
from comfy_execution.utils import get_executing_context

from comfy_tpu.comfy.native.block_patches import PatchedFunction
from comfy_tpu.comfy.native.compiled_sizes import CompiledSizes, Size
from comfy_tpu.comfy.native.constants import WithConstants
from comfy_tpu.comfy.native.foreign_patches import module_structure
from comfy_tpu.comfy.run import NodeReport, Outcome, report_idle, start
from comfy_tpu.comfy.unloading import register_with_comfyui
from comfy_tpu.config import (
    AttentionConfig,
    AttentionImplementation,
    BlockSizes,
    GenerationSettings,
    RunOptions,
    RuntimeConfig,
)
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.pipeline.progress import Progress

if TYPE_CHECKING:
    from comfy_tpu.compiler.component import ComponentSpec
    from comfy_tpu.compiler.hosted import HostedModule
    from comfy_tpu.compiler.program import ProgramEvent

VARYING = frozenset({"block_index"})
"""Entries of transformer_options that differ between blocks, for patches; without patches, no block reads them."""
_PATCHED_MAX = 8
"""Sets of patches or constants whose programs are kept: every position of a slider may be one."""

Part = Literal["transformer", "text_encoder", "vae"]
"""The role of a module in a model, by our families' names."""


@dataclasses.dataclass(frozen=True)
class Choices:
    """How a TPU Compile node runs its module."""

    mesh: str = "auto"
    precision: str = "auto"
    attention: AttentionImplementation = "auto"
    block_sizes: BlockSizes | None = None
    dense_max_tokens: int = AttentionConfig.dense_max_tokens
    cpu_fallback: bool = dataclasses.field(default=False, compare=False)  # no program depends on it
    """Whether a large module that cannot run on the devices may run on the CPU."""


def make_choices(widgets: Mapping[str, Any], options: RunOptions | None) -> Choices:
    """The choices of a node: those of TPU Options where it is connected, else the node's own."""
    if options is None:
        return Choices(**widgets)
    runtime, attention = options.runtime, options.runtime.attention
    unused = {
        "quantize": (runtime.quantize, "none"),
        "fast": (runtime.fast is not None, False),
        "vae_backend": (runtime.vae_backend, RuntimeConfig.vae_backend),
        "tiny_vae": (runtime.tiny_vae, "none"),
        "reuse": (options.reuse, GenerationSettings.reuse),
        "guidance_until": (options.guidance_until, GenerationSettings.guidance_until),
        "num_videos": (options.num_videos, GenerationSettings.num_videos),
        **{name: (value, getattr(GenerationSettings, name)) for name, value in options.context_settings.items()},
        "preset": (options.preset, "none"),
        "attention_window": (attention.window, "full"),
    }
    for name, (chosen, neutral) in unused.items():
        if chosen not in (neutral, None):
            raise InvalidValueError(
                f"{name}={chosen} in TPU Options is for the nodes of a model family, and ComfyUI's own models run "
                f"without it; choose {neutral}",
                field=name,
            )
    return Choices(
        str(runtime.mesh),
        runtime.dtype,
        attention.implementation,
        attention.block_sizes,
        attention.dense_max_tokens,
        options.cpu_fallback,
    )


class CodeChangedError(Exception):
    """A module's code is not what a call took it for; the call is made again."""


class Host:
    """A module on the devices, for the node that runs now."""

    def __init__(
        self,
        module: torch.nn.Module,
        choices: Choices,
        part: Part,
        prepare: Callable[[torch.nn.Module], None],
        title: str,
    ) -> None:
        from comfy_tpu.compiler.hosted import HostedModule
        from comfy_tpu.compiler.residency import shared_residency
        from comfy_tpu.parallel.mesh import make_placement

        placement = make_placement(choices.mesh)
        on_cpu = placement.platform == "cpu"
        wanted = choices.precision if choices.precision != "auto" else "float32" if on_cpu else "bfloat16"
        self.dtype: torch.dtype = getattr(torch, wanted)
        self.size = ""
        """The size of the current call, for progress reports."""
        self._name = type(module).__name__
        self._display: dict[str, Any] = {"model": title, "part": part}
        self._report: NodeReport | None = None
        self._run: tuple[object, float] | None = None
        self._step: int | None = None
        self._patched: dict[Callable[..., Any], None] = {}
        self._check: Callable[[], None] | None = None
        self._is_checked = False
        self._sizes = CompiledSizes()
        self._build_seconds = 0.0
        self._hosted: HostedModule = HostedModule(
            module,
            name=self._name,
            title=title,
            part=part,
            placement=placement,
            dtype=self.dtype,
            attention=AttentionConfig(
                implementation=choices.attention,
                block_sizes=choices.block_sizes,
                dense_max_tokens=choices.dense_max_tokens,
            ),
            residency=shared_residency(),
            tables=[spec.rules for spec in _components() if spec.name.startswith(part)],
            prepare=lambda skeleton: _prepare(skeleton, prepare),
            varying=VARYING,
            on_event=self._on_event,
            on_load=lambda done, total: self._report_progress(
                Progress("loading", self._name, done, total, **self._display)
            ),
        )

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs `function(module, …)` on the devices. Running out of memory raises ComfyUI's own exception."""
        comfy.model_management.throw_exception_if_processing_interrupted()
        start()
        register_with_comfyui()
        self._begin()
        check, self._check = self._check, None
        with self._reported_errors():
            results = self._hosted(function, *args, meanwhile=check, is_checked=self._is_checked, **kwargs)
            self._is_checked = self._is_checked or check is not None
            return results

    @contextlib.contextmanager
    def _reported_errors(self) -> Iterator[None]:
        """Shows how a call ended; turns DeviceMemoryError into ComfyUI's own exception."""
        from comfy_tpu.errors import DeviceMemoryError

        try:
            yield
        except CodeChangedError:
            raise
        except comfy.model_management.InterruptProcessingException:
            self._abort("cancelled")
            raise
        except DeviceMemoryError as error:
            # ComfyUI decodes in tiles where it sees its own out-of-memory error, and unloads models.
            self._abort("failed")  # until a tile is reported
            raise comfy.model_management.OOM_EXCEPTION(str(error)) from error
        except Exception:
            self._report_nothing()  # the module runs without us, and what was shown is over
            report_idle()
            raise

    @contextlib.contextmanager
    def checking_meanwhile(self, check: Callable[[], None]) -> Iterator[None]:
        """`check` is called while the devices compute the first call in the block. It may raise CodeChangedError.

        Weights, too, are searched for changes in that call alone: nothing comes between it and the others.
        """
        self._check = check
        try:
            yield
        finally:
            self._check, self._is_checked = None, False

    def report_meanwhile(self, report: Callable[[], None]) -> None:
        """Calls `report` at once, or after the check of a first call that is to be made meanwhile: what it reads from a
        GPU may be there only after the step before, and the devices should have this one by then."""
        check = self._check
        if check is None:
            report()
            return

        def check_and_report() -> None:
            check()
            report()

        self._check = check_and_report

    def run_padded(
        self, signature: Hashable, size: Size, run: Callable[[Size], torch.Tensor], max_work: float = math.inf
    ) -> torch.Tensor:
        """`run(padded)` for a size that is compiled already, if that is cheaper, or else for the size itself.

        `signature`: what else a program depends on; `max_work`: the largest ratio of padded to real work.
        """
        padded = self._sizes.choose(signature, size, max_work)
        begin, built = time.perf_counter(), self._build_seconds
        result = run(padded)
        if padded != size and result.is_cuda:
            torch.cuda.current_stream(result.device).synchronize()  # its duration counts
        self._sizes.record(signature, size, padded, time.perf_counter() - begin, self._build_seconds - built)
        return result

    def run_patched(self, function: PatchedFunction | WithConstants, *args: Any, device: torch.device) -> Any:
        """Runs a function with patches or constants; of the functions that ran longest ago, the programs are freed."""
        self._patched.pop(function, None)
        self._patched[function] = None
        for oldest in list(self._patched)[:-_PATCHED_MAX]:
            del self._patched[oldest]
            self._hosted.forget(oldest)
        return self(function, *args, device=device)

    def fetch(self, results: Any) -> Any:
        """The results of a call with `fetch=False` as host tensors. Errors of the computation may come only now."""
        with self._reported_errors():
            return self._hosted.fetch(results)

    def release(self) -> None:
        """Frees the module's memory on the devices. Programs are freed with this object."""
        self._hosted.release()

    def begin_step(self, index: int, total: int) -> None:
        """Reports a sampler's step before its first call; a step may consist of several calls."""
        if total and index != self._step:
            self._begin()
            self._report_progress(Progress("denoising", "", index, total, size=self.size, **self._display))
        self._step = index

    def end_steps(self, outcome: Outcome = "done") -> None:
        """Marks the end of sampling, also when it was cancelled."""
        self._step = None
        self.show_end(outcome)

    def show_end(self, outcome: Outcome = "done") -> None:
        """Shows on the node how long this module has been running for it."""
        if self._report is not None and self._run is not None:
            self._report.show_end(outcome, time.monotonic() - self._run[1])

    def _abort(self, outcome: Outcome) -> None:
        """Ends the text on the node and the panel's activity: nobody else does, for a text encoder or a VAE."""
        self.show_end(outcome)
        report_idle()

    def _report_nothing(self) -> None:
        if self._report is not None:
            self._report.show_nothing()

    def _begin(self) -> None:
        """Reports to the current node from now on; its time begins with its first call in a prompt."""
        context = get_executing_context()
        run = (context.prompt_id, context.node_id) if context else None
        if self._run is None or self._run[0] != run:
            self._run = run, time.monotonic()
        self._report = NodeReport(context.node_id if context else None)

    def _on_event(self, event: ProgramEvent) -> None:
        self._build_seconds += event.seconds
        if event.stage in ("compiling", "cache_miss", "ready"):
            done, compiles = int(event.stage == "ready"), event.stage == "cache_miss"
            state: dict[str, Any] = {"size": self.size, "from_cache": event.from_cache, "compiles": compiles}
            self._report_progress(Progress("compiling", event.program, done, 1, **state, **self._display))

    def _report_progress(self, progress: Progress) -> None:
        if self._report is not None:
            self._report(progress)


_hosts: weakref.WeakKeyDictionary[torch.nn.Module, dict[tuple[Choices, Hashable], Host]] = weakref.WeakKeyDictionary()
_lock = threading.RLock()
_STRUCTURES_MAX = 3
"""Structures of a module whose programs are kept: a node that changes it anew at every run must not fill the memory."""


def find_host(
    module: torch.nn.Module,
    choices: Choices,
    part: Part,
    prepare: Callable[[torch.nn.Module], None],
    title: str = "",
) -> Host:
    """The host of a module, which all clones of a model share, with its programs and weights on the devices.

    A module whose structure changed gets another host, because programs belong to one structure.
    """
    key = (choices, module_structure(module))
    with _lock:
        hosts = _hosts.setdefault(module, {})
        if key not in hosts:
            older = [each for each in hosts if each[0] == choices]
            for each in older[: len(older) - _STRUCTURES_MAX + 1]:
                hosts.pop(each).release()
            hosts[key] = Host(module, choices, part, prepare, title or class_title(type(module).__name__))
        return hosts[key]


def end_steps(module: torch.nn.Module, outcome: Outcome = "done") -> None:
    """Marks the end of sampling with a module, also when it was cancelled."""
    for host in _hosts.get(module, {}).values():
        host.end_steps(outcome)


def class_title(name: str) -> str:
    """The name of a class of ComfyUI's in words: WAN21_T2V -> WAN 2.1 T2V."""
    words = name.strip("_").split("_")
    return " ".join(re.sub(r"(?<=[A-Za-z]{2})(\d)(\d)$", r" \1.\2", word) for word in words)


def pixel_size(latents: Sequence[int], spatial_scale: int | None, temporal_scale: int | None) -> str:
    """The size of latents with these sides (frames, height and width, or the last two) in pixels: "832×480×81". Without
    the frames where their scale is unknown, and empty where all is."""
    if spatial_scale is None or len(latents) not in (2, 3):
        return ""
    *frames, height, width = latents
    size = [width * spatial_scale, height * spatial_scale]
    if frames and temporal_scale:
        size.append((frames[0] - 1) * temporal_scale + 1)
    return "×".join(map(str, size))


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
