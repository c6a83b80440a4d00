"""Every exception a user can meet. Messages say what happened, what was got, what was expected, what to do."""

from collections.abc import Iterable


class ComfyTpuError(Exception):
    """The root of all errors this package raises on purpose."""


class InvalidValueError(ComfyTpuError, ValueError):
    """A value that the caller chose cannot work."""


class MeshError(InvalidValueError):
    """The device mesh asked for cannot be built, or does not fit the model."""


class ShardingError(InvalidValueError):
    """Sharding rules and weights do not fit each other."""


class CheckpointError(ComfyTpuError):
    """A checkpoint is missing, damaged, or not the one the model needs."""


class StackingError(ComfyTpuError):
    """A list of blocks cannot be run as one scanned block."""


class TraceError(ComfyTpuError):
    """A model did something that cannot be turned into a compiled program."""


class MissingOperatorError(TraceError, NotImplementedError):
    """A model called a torch operator that neither torchax nor the operator table implements."""


class UnsupportedError(ComfyTpuError, NotImplementedError):
    """A known feature was asked for in a form that is not implemented."""


class EscapeError(ComfyTpuError):
    """A device tensor was about to leave through a boundary that promises host data."""


class DeviceMemoryError(ComfyTpuError, MemoryError):
    """The device has no room for what was asked, even after evicting everything that is not in use."""


def listed(names: Iterable[str], most: int = 5, separator: str = ", ", before_rest: str = " ") -> str:
    """The first few of many names, and how many more there are: an error over a whole model stays readable."""
    names = list(names)
    more = len(names) - most
    return separator.join(names[:most]) + (f"{before_rest}and {more} more" if more > 0 else "")
