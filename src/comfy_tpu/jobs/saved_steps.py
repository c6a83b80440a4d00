"""The steps of a batch's jobs, saved in the batch's own directory: a job whose worker was ended goes on from there, on
this machine or, where the directory is remote, on another one."""

from __future__ import annotations

import logging
from pathlib import Path
from tempfile import TemporaryDirectory

from comfy_tpu.errors import ComfyTpuError
from comfy_tpu.jobs.folder import Folder
from comfy_tpu.jobs.outcome import CancelledError
from comfy_tpu.jobs.output_names import steps_name
from comfy_tpu.parallel import hosts
from comfy_tpu.pipeline.step_checkpoint import StepCheckpoint

logger = logging.getLogger(__name__)


class SavedSteps:
    """Opens the files that steps are saved to, those of one job at a time. The driver removes them (driver.py)."""

    def __init__(self, folder: Folder, every: int) -> None:
        """`folder`: the batch's, as the driver has it. `every`: steps between two saves."""
        self._folder = folder
        self._every = every
        self._directory: TemporaryDirectory[str] | None = None
        """For copies of files of a remote directory."""

    def open(self, id_: str, part: str = "") -> StepCheckpoint:
        """Of a job. `part`: a name for each denoising but the first."""
        if not hosts.is_first_host():
            return StepCheckpoint(Path(), self._every)
        name = steps_name(id_, part)
        if self._folder.local is not None:
            path = self._folder.local / name
            path.parent.mkdir(parents=True, exist_ok=True)
            return StepCheckpoint(path, self._every, cancelled_by=(CancelledError,))
        if self._directory is None:
            self._directory = TemporaryDirectory(prefix="comfy-tpu-steps-")
        path = Path(self._directory.name) / f"{part or 'first'}.safetensors"
        path.unlink(missing_ok=True)
        try:
            self._folder.download(name, path)
        except ComfyTpuError as error:
            logger.warning("%s; the job begins at its first step", error)
        return StepCheckpoint(
            path,
            self._every,
            cancelled_by=(CancelledError,),
            shown_path=f"{self._folder.address}/{name}",
            upload=lambda saved: self._folder.upload(saved, name),
        )

    def remove(self, id_: str) -> None:
        """Lets a job begin at its first step, where what was saved cannot be trusted."""
        if hosts.is_first_host():
            self._folder.remove([steps_name(id_)])

    def close(self) -> None:
        if self._directory is not None:
            self._directory.cleanup()
