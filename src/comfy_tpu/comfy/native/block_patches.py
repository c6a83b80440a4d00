"""Patches that other nodes put into a model's blocks (`transformer_options`), traced as a part of the program.

A patch is a Python function of traced tensors. It runs while the program is traced and never again, so it is traced
only if it would do the same at every later call: see `callable_state` for its state. Values of the sampler that change
from step to step are in its options as objects that cannot be read.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode

from comfy_tpu.comfy.native.callable_state import CallableState, code_identity, read_state
from comfy_tpu.errors import UnsupportedError

PATCH_OPTIONS = ("patches", "patches_replace")
"""Keys of transformer_options with patches."""


@dataclasses.dataclass(frozen=True, eq=False)
class BlockPatches:
    """The patches of one call. Reading them raises UnsupportedError if one has a state that cannot be compared."""

    options: Mapping[str, Mapping[str, Any]]
    """transformer_options["patches"] and ["patches_replace"], without empty entries."""
    unreadable: frozenset[str]
    """Names of the sampler's options that change from step to step."""
    absent: frozenset[str]
    """Names of the sampler's options that are None."""

    @property
    def places(self) -> list[tuple[Hashable, Any]]:
        """(place in the model, patch), in a fixed order."""
        found: list[tuple[Hashable, Any]] = []
        for option, kinds in self.options.items():
            for kind, patches in kinds.items():
                entries = patches.items() if isinstance(patches, dict) else enumerate(patches)
                found += [((option, kind, place), patch) for place, patch in entries]
        return found

    @property
    def structure(self) -> Hashable:
        """A key of places and code, without values: what does not change from step to step."""
        return tuple((place, code_identity(patch)) for place, patch in self.places)

    @property
    def in_blocks(self) -> bool:
        """Whether blocks call patches. Those of `patches_replace["dit"]` are called by the loop over blocks."""
        return any(
            kind != "dit" or option != "patches_replace" for option, kinds in self.options.items() for kind in kinds
        )

    def describe(self) -> str:
        """The patches by their names, for messages."""
        names = (getattr(patch, "__qualname__", type(patch).__qualname__) for _, patch in self.places)
        kinds = (kind for kinds in self.options.values() for kind in kinds)
        return f"{', '.join(dict.fromkeys(kinds))}: {', '.join(dict.fromkeys(names))}"

    def read_state(self) -> CallableState:
        """The state of all patches. Raises UnsupportedError where it cannot be compared."""
        try:
            return read_state(patch for _, patch in self.places)
        except UnsupportedError as error:
            raise UnsupportedError(f"a patch of the model ({self.describe()}) cannot be compiled: {error}") from error

    def key(self) -> Hashable:
        """A key of all that the patches compute. Equal keys: the same program."""
        return tuple(place for place, _ in self.places), self.read_state().key, self.unreadable, self.absent


def find_patches(options: Mapping[str, Any], sampler_options: frozenset[str]) -> BlockPatches | None:
    """The patches among transformer_options; None if there are none."""
    found = {}
    for name in PATCH_OPTIONS:
        kinds = {kind: patches for kind, patches in (options.get(name) or {}).items() if patches}
        if kinds:
            found[name] = kinds
    if not found:
        return None
    given = sampler_options.intersection(options)
    absent = frozenset(name for name in given if options[name] is None)
    return BlockPatches(found, given - absent, absent)


@contextlib.contextmanager
def traced_patches(patches: BlockPatches) -> Iterator[dict[str, Any]]:
    """transformer_options for one pass of a trace with patches.

    Raises UnsupportedError at the end, and puts the patches' state back, if they read what changes from step to step,
    changed their state, or caught an error that they would not have met on the host.
    """
    state, refusals = patches.read_state(), _Refusals()
    options: dict[str, Any] = {name: _Unreadable(name, refusals) for name in patches.unreadable}
    options |= dict.fromkeys(patches.absent)
    for name, kinds in patches.options.items():
        options[name] = {kind: each.copy() if hasattr(each, "copy") else each for kind, each in kinds.items()}
    try:
        with _FailureRecorder(refusals), _without_checkpointing():
            yield options
        refusals.check(patches, *refusals.caught)
        if patches.read_state().key != state.key:
            raise UnsupportedError(
                f"a patch of the model ({patches.describe()}) keeps something from one call to the next, which a "
                "compiled program would not repeat"
            )
    except BaseException:
        state.restore()
        refusals.check(patches)
        raise


@contextlib.contextmanager
def _without_checkpointing() -> Iterator[None]:
    """Makes torch's gradient checkpointing a plain call, which it is without gradients: it asks the device for its
    torch module, and there is none. SD3's blocks use it where a patch calls them."""

    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        options = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
        return function(*args, **{name: value for name, value in kwargs.items() if name not in options})

    original = torch.utils.checkpoint.checkpoint
    torch.utils.checkpoint.checkpoint = cast(Any, checkpoint)  # torch 2.15 declares overloads
    try:
        yield
    finally:
        torch.utils.checkpoint.checkpoint = original


@dataclasses.dataclass
class _Refusals:
    reads: list[str] = dataclasses.field(default_factory=list)
    """What was read that changes from step to step."""
    caught: list[str] = dataclasses.field(default_factory=list)
    """Errors of torch functions, which other code may have caught."""

    def check(self, patches: BlockPatches, *others: str) -> None:
        for reason in (*self.reads, *others):
            raise UnsupportedError(f"a patch of the model ({patches.describe()}) {reason}")


class _FailureRecorder(TorchFunctionMode):
    """Notes errors of torch functions: code that catches one goes on, but not as it would on the host."""

    def __init__(self, refusals: _Refusals) -> None:
        super().__init__()
        self._refusals = refusals

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            self._refusals.caught.append(f"does what cannot be traced: {type(error).__name__}: {error}")
            raise


class _Unreadable:
    """Stands for a value that changes from step to step: whatever reads it ends the trace."""

    __slots__ = ("name", "refusals")

    def __init__(self, name: str, refusals: _Refusals) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "refusals", refusals)

    def __getattribute__(self, attribute: str) -> Any:
        # Also for __class__, which isinstance asks for.
        name, refusals = object.__getattribute__(self, "name"), object.__getattribute__(self, "refusals")
        reason = f"reads {name} among transformer_options, which changes from step to step"
        refusals.reads.append(reason)
        raise UnsupportedError(reason)


def _read(self: _Unreadable, *args: Any) -> Any:
    return self.value


_OPERATORS = (
    "bool len iter next contains getitem setitem delitem call hash eq ne lt le gt ge add radd sub rsub mul rmul "
    "truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul neg pos abs invert and rand or ror xor rxor "
    "int float index complex round str repr format enter exit array reversed"
)
for _operator in _OPERATORS.split():
    setattr(_Unreadable, f"__{_operator}__", _read)  # Python looks these up on the class


class StateBudget:
    """Counts the states in which patches are met during one run of a sampler: each is a program of its own."""

    MAX_STATES = 2

    def __init__(self) -> None:
        self._states: dict[Hashable, set[Hashable]] = {}
        self._refused: set[Hashable] = set()

    def begin_run(self) -> None:
        self._states.clear()

    def find_problem(self, patches: BlockPatches) -> str:
        """Why the patches are not compiled; empty if they are."""
        structure = patches.structure
        if structure not in self._refused:
            states = self._states.setdefault(structure, set())
            states.add(patches.key())
            if len(states) <= self.MAX_STATES:
                return ""
            self._refused.add(structure)
        return (
            f"a patch of the model ({patches.describe()}) changes while the sampler runs, and each of its states would "
            "be a program of its own"
        )


@dataclasses.dataclass(frozen=True)
class PatchedFunction:
    """A function for a trace, with patches. Two are equal if they compute the same."""

    function: Callable[..., Any]
    key: Hashable
    patches: BlockPatches = dataclasses.field(compare=False)
    varying: frozenset[str]
    """Entries of dictionaries that differ between blocks but are not read by them, as in `HostedModule`."""

    @property
    def __name__(self) -> str:
        return f"{self.function.__name__}_with_patches"

    def __call__(self, module: torch.nn.Module, *inputs: Any) -> Any:
        with traced_patches(self.patches) as options:
            return self.function(module, *inputs, options)
