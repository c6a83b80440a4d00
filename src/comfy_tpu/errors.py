"""Every exception a user can meet. Messages say what happened, what was got, what was expected, what to do."""

import contextlib
import errno
import re
from collections.abc import Iterable, Iterator
from typing import Literal, get_args

from comfy_tpu.distribution import find_page
from comfy_tpu.terminal_text import sanitize

GUIDE = find_page("porting.md")

Section = Literal[
    "tensor-condition",
    "tensor-assert",
    "tensor-to-number",
    "mask-indexing",
    "data-dependent-shape",
    "cuda",
    "distributed",
    "gpu-only-import",
    "host-tensor-written",
    "random-in-forward",
    "python-random",
    "kept-tensor",
    "large-constant",
    "meta-tensor",
    "results",
    "float64",
    "complex",
    "strided-write",
    "square-mask",
    "dtype-drift",
    "missing-operator",
    "shared-memory",
    "uneven-blocks",
    "no-sharding-rule",
    "trace",
    "lowering",
    "parity",
    "out-of-memory",
]
"""Sections of the porting guide about what a compiled program cannot do, or does slowly. Each is an anchor there."""
SECTIONS: tuple[str, ...] = get_args(Section)


_LINE_BREAKS = re.compile(r"\s*\n\s*")


class ComfyTpuError(Exception):
    """The base class of this package's errors. Its text is safe to print, whatever a message quotes."""

    def __init__(self, message: str = "", *, field: str | None = None, has_lines: bool = False) -> None:
        """`field`: the parameter whose value is refused; the message begins with its name. `has_lines`: whether the
        message is a list; of any other, line breaks come from what it quotes."""
        super().__init__(message)
        self.field = field
        self._has_lines = has_lines

    def __str__(self) -> str:
        text = sanitize(super().__str__())
        return text if self._has_lines else _LINE_BREAKS.sub(" ", text.strip())


def rename_field(message: str, field: str | None, name: str | None) -> str:
    """The message with another name for its field."""
    return f"{name}{message[len(field) :]}" if field and name and _begins_with(message, field) else message


def rename_as_flag(message: str, field: str | None, flag: str | None) -> str:
    """The message with a flag for its field: "--height 100 is …" for "height=100 is …"."""
    return f"{flag} {message[len(field) + 1 :]}" if field and flag and _begins_with(message, field) else message


def _begins_with(message: str, field: str) -> bool:
    return message.startswith((f"{field}=", f"{field} "))


class InvalidValueError(ComfyTpuError, ValueError):
    """A value that the caller chose cannot work."""


class MeshError(InvalidValueError):
    """The device mesh asked for cannot be built, or does not fit the model."""


class HostsError(ComfyTpuError):
    """The processes of a run on several hosts did not find each other, or differ."""


class ShardingError(InvalidValueError):
    """Sharding rules and weights do not fit each other."""


class CheckpointError(ComfyTpuError):
    """A checkpoint is missing, damaged, or not the one the model needs."""


class SkeletonSizeError(CheckpointError):
    """A module asks for more weights or memory while it is built than its checkpoint, or any model, has."""


class StackingError(ComfyTpuError):
    """A list of blocks cannot be run as one scanned block."""


class TraceError(ComfyTpuError):
    """A model did something that cannot be turned into a compiled program."""


class MissingOperatorError(TraceError, NotImplementedError):
    """A model called a torch operator that neither torchax nor the operator table implements."""


class UnsupportedError(ComfyTpuError, NotImplementedError):
    """A known feature was asked for in a form that is not implemented."""


class NotFiniteError(ComfyTpuError):
    """A stage of a pipeline computed NaN or infinity."""


class EscapeError(ComfyTpuError):
    """A device tensor was about to leave through a boundary that promises host data."""


class DeviceMemoryError(ComfyTpuError, MemoryError):
    """The device has no room for what was asked, even after evicting everything that is not in use."""


def see(section: Section) -> str:
    """The end of an error message: a reference to a section of the guide."""
    return f"; see {GUIDE}#{section}"


def section_of(error: BaseException) -> tuple[str, str | None]:
    """The message without its reference to the guide, and the section."""
    message, _, section = str(error).partition(f"; see {GUIDE}#")
    return message, section or None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is XLA's out-of-memory error of a device."""
    return isinstance(error, RuntimeError | ValueError) and "RESOURCE_EXHAUSTED" in str(error)


_HOST_MEMORY = (
    "can't allocate memory",  # torch
    "can't start new thread",  # Python: a stack is memory
    "failed to map segment",  # the loader, of a library's code
    "RESOURCE_EXHAUSTED",  # XLA, outside of a program
    "std::bad_alloc",
)


def is_out_of_host_memory(error: BaseException) -> bool:
    """Whether an error of a library means that the host has no more memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    known = isinstance(error, RuntimeError | ImportError) and any(text in str(error) for text in _HOST_MEMORY)
    return known or isinstance(error, MemoryError)


@contextlib.contextmanager
def device_errors(what: str) -> Iterator[None]:
    """Turns the runtime's out-of-memory error into DeviceMemoryError."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceMemoryError(
            f"{what} does not fit in device memory ({str(error).splitlines()[0]}); use a smaller size, fewer frames, "
            f"or a mesh with more devices{see('out-of-memory')}"
        ) from error


@contextlib.contextmanager
def config_errors(what: str) -> Iterator[None]:
    """Turns any exception that a wrong value in a model's file causes into CheckpointError about `what`, the file. Our
    own errors pass."""
    try:
        yield
    except SkeletonSizeError as error:
        raise CheckpointError(f"{what} {error}; download the model again") from error
    except (ComfyTpuError, ImportError, OSError):  # not what a value leads to
        raise
    except MemoryError as error:
        raise CheckpointError(
            f"{what} leads to more memory than there is ({_short(error)}); close other programs, or download the model "
            "again if its numbers are wrong"
        ) from error
    except Exception as error:  # libraries check their values in as many ways as there are libraries
        raise CheckpointError(f"{what} cannot be used ({_short(error)}); download the model again") from error


def import_error(what: str, error: Exception) -> UnsupportedError:
    """The error about `what`, a part of a library, that does not import.

    diffusers and transformers import lazily, and say only that they could not: the first failure is the reason.
    """
    cause: BaseException = error
    while cause.__cause__ or cause.__context__:
        cause = cause.__cause__ or cause.__context__ or cause
    return UnsupportedError(
        f"{what} cannot be imported here ({type(cause).__name__}: {cause}); mend that package, or remove it if nothing "
        "needs it"
    )


@contextlib.contextmanager
def trace_errors(part: str, model: str) -> Iterator[None]:
    """Turns any exception into TraceError while a part of a model is traced, where wrong values are first used."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, ComfyTpuError) or is_out_of_memory(error):
            raise
        raise TraceError(
            f"model={model}: the {part} cannot be run as its config.json describes it ({_short(error)}); download the "
            f"model again, or report it with that file{see('trace')}",
            field="model",
        ) from error


def _short(error: Exception) -> str:
    """The type and the beginning of the message of an error, in one line."""
    reason = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__


def join_names(names: Iterable[str], limit: int = 5, separator: str = ", ", before_rest: str = " ") -> str:
    """The first `limit` names and the number of the others, so that an error about a whole model stays readable."""
    names = list(names)
    more = len(names) - limit
    return separator.join(names[:limit]) + (f"{before_rest}and {more} more" if more > 0 else "")
