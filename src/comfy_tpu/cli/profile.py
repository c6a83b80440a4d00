"""A run as JAX's profiler sees it, for TensorBoard and Perfetto."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from comfy_tpu.cli.terminal import print_message
from comfy_tpu.errors import ComfyTpuError
from comfy_tpu.pipeline.progress import Progress


class Profile:
    """Records from the first progress of a pipeline to the end of the block. Without a directory it does nothing.

    Not from the beginning of the block: a run that is refused leaves nothing behind.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._is_recording = False

    def __enter__(self) -> Profile:
        return self

    def __call__(self, progress: Progress) -> None:
        if self._directory is None or self._is_recording:
            return
        import jax

        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # the stages have names; every call of Python would be a hundred times as much
        with _explained(self._directory):
            self._directory.mkdir(exist_ok=True)
            jax.profiler.start_trace(self._directory, create_perfetto_trace=True, profiler_options=options)
        self._is_recording = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._is_recording or self._directory is None:
            return
        import jax

        self._is_recording = False
        with _explained(self._directory):
            jax.profiler.stop_trace()
        newest = max(self._directory.glob("plugins/profile/*/perfetto_trace.json.gz"))  # directories are named by time
        print_message(
            f"profile: open {newest} at https://ui.perfetto.dev, or run: tensorboard --logdir {self._directory}"
        )


@contextlib.contextmanager
def _explained(directory: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ComfyTpuError(
            f"profile={directory} could not be recorded ({reason}); choose another place, or leave it out",
            field="profile",
        ) from error
