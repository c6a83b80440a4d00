"""The state of the loop over the steps in a file, so that a run that was ended goes on where it was.

Safetensors with metadata:

    samples.I, outputs.I    the last samples and velocities, newest first: all that a step reads besides its inputs
    segments.I              latents of the finished segments of a video that is made by segments

The metadata describe the request and all that decides the bits of its result. The file of another request is not used.
Nothing else is state: schedulers are tables, windows and timed prompts depend on the number of the step, and noise is
drawn once, before the first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import torch
from safetensors import safe_open
from safetensors.torch import save

from comfy_tpu.bridge import to_host
from comfy_tpu.errors import CheckpointError, ComfyTpuError, InvalidValueError
from comfy_tpu.families.settings import check_checkpoint_every
from comfy_tpu.json_input import parse_json
from comfy_tpu.parallel.hosts import first_host_value, host_names, is_first_host, shared_files
from comfy_tpu.pipeline import atomic
from comfy_tpu.pipeline.deferred_signals import DeferredSignals, deferring
from comfy_tpu.pipeline.embeddings import Embeddings, PromptEmbeddings
from comfy_tpu.safetensors_input import SAFETENSORS_ERRORS

logger = logging.getLogger(__name__)

FORMAT = 1
STAGE = "steps"
SUFFIX = ".checkpoint.safetensors"

_PROGRESS = ("segment", "done", "digest")
"""Metadata of the state, which are not of the request."""
_NAMES = {
    "model_fingerprint": "model",
    "pictures": "images or videos",
    "loras": "LoRAs",
    "quantize": "8-bit products",
    "attention_window": "attention window",
    "vae_backend": "VAE backend",
    "comfy_tpu": "version of comfy-tpu",
    "jax": "version of jax",
}


def checkpoint_path(output: Path, part: str = "") -> Path:
    """The place of the checkpoint of a run that writes `output`. `part`: as in `x.mp4.second-pass.checkpoint…`."""
    return output.with_name(output.name + (f".{part}" if part else "") + SUFFIX)


def digest_embeddings(embeddings: PromptEmbeddings) -> str:
    """Of everything that the steps read of the prompts, images and videos."""
    timed = [
        (each.start, each.end, each.embeddings) for each in (*embeddings.timed_positive, *embeddings.timed_negative)
    ]
    parts: list[Embeddings] = [embeddings.positive, embeddings.negative or {}, embeddings.shared]
    named = {f"{number} {name}": rows for number, part in enumerate(parts) for name, rows in part.items()}
    for number, (start, end, rows) in enumerate(timed):
        named |= {f"timed {number} {start} {end} {name}": row for name, row in rows.items()}
    return _digest(named)


class StepCheckpoint:
    """A file that the steps of one run are saved to, every few steps and on SIGTERM, and go on from."""

    def __init__(
        self,
        path: Path,
        every: int,
        *,
        report: Callable[[str], None] = logger.info,
        cancelled_by: tuple[type[Exception], ...] = (),
        shown_path: str = "",
        upload: Callable[[Path], None] = lambda path: None,
    ) -> None:
        """`every`: steps between two saves. `report` gets a sentence where a run goes on, or was stopped.
        `cancelled_by`: errors of a progress callback that end a run which is to go on later. `shown_path`: what
        messages call the file; the default is its path. `upload` gets the file after each save; its ComfyTpuError
        counts as one of the save."""
        check_checkpoint_every(every)
        self.path = path
        self._shown_path = shown_path or str(path)
        self._cancelled_by = cancelled_by
        self._upload = upload
        self.resumed_after = 0
        """The steps that this run did not have to compute, of all segments."""
        self.segments: list[torch.Tensor] = []
        """Latents of the finished segments."""
        self._every = every
        self._report = report
        self._description: dict[str, str] = {}
        self._steps = self._total = 0
        self._restored: dict[str, torch.Tensor] = {}
        self._restored_steps = 0
        self._saved_steps = 0
        self._signals = DeferredSignals()
        self._warned = False

    def check(self) -> None:
        """Raises InvalidValueError where the file cannot be written, or would replace one of another kind. Before
        anything is computed."""
        if not is_first_host():
            return
        if self.path.is_symlink():  # nobody chose the name, and in a shared directory anybody may put a link there
            raise InvalidValueError(
                f"checkpoint={self._shown_path} is a link, and steps are not saved through one; remove it, or choose "
                "another output",
                field="checkpoint",
            )
        atomic.check_place(self.path, field="checkpoint")
        with contextlib.suppress(CheckpointError):  # damaged: replaced with a warning, later
            self._read_metadata()

    def begin(self, description: Mapping[str, str], *, steps: int, segments: int = 1) -> None:
        """Reads what an earlier run of the same request saved. `description`: of the request. `steps`: of a segment."""
        self._description = {"artifact": STAGE, "format": str(FORMAT), **description}
        self._steps, self._total = steps, steps * segments
        found = first_host_value(self._find)
        if found is None:
            return
        with shared_files({"checkpoint": self.path}) as files:
            metadata, tensors = _read(files["checkpoint"])
        self.segments = _numbered(tensors, "segments")
        self._restored = tensors
        self._restored_steps = self._saved_steps = int(metadata["done"])
        self.resumed_after = len(self.segments) * steps + self._restored_steps
        self._report(f"resumed after step {self.resumed_after} of {self._total}, from {self._shown_path}")

    def restore(self, first: torch.Tensor) -> tuple[int, list[torch.Tensor], list[torch.Tensor]] | None:
        """Steps done, samples and velocities of the segment in which the earlier run was; None: from its first step.
        `first`: the sample before that."""
        tensors, self._restored = self._restored, {}
        samples, outputs = _numbered(tensors, "samples"), _numbered(tensors, "outputs")
        if not samples or any(each.shape != first.shape for each in (*samples, *outputs)):
            self._saved_steps = 0
            return None
        return self._restored_steps, samples, outputs

    @contextlib.contextmanager
    def deferring_signals(self) -> Iterator[None]:
        """Lets termination signals wait for `after_step` or `stop_if_asked` in the block. On several hosts a signal to
        one of them ends all, which cannot wait for a step: those go on from the last save."""
        with deferring(is_active=not host_names()) as self._signals:
            yield

    def after_step(self, done: int, samples: Sequence[jax.Array], outputs: Sequence[jax.Array]) -> None:
        """Saves the state if it is time to. `done`: steps of this segment."""
        count = len(self.segments) * self._steps + done
        if count % self._every == 0 or done == self._steps:
            self._save(done, samples, outputs)
        self.stop_if_asked(done, samples, outputs)

    def stop_if_asked(self, done: int, samples: Sequence[jax.Array], outputs: Sequence[jax.Array]) -> None:
        """Saves the state and delivers the signal, if one came."""
        if self._signals.received is None:
            return
        count = len(self.segments) * self._steps + done
        if done != self._saved_steps and not self._save(done, samples, outputs):
            count -= done - self._saved_steps
        saved = f"the same command goes on from {self._shown_path}" if count else "nothing was saved yet"
        self._report(f"stopped after step {count} of {self._total}; {saved}")
        self._signals.deliver()

    @contextlib.contextmanager
    def saving_if_cancelled(
        self, done: int, samples: Sequence[jax.Array], outputs: Sequence[jax.Array]
    ) -> Iterator[None]:
        """Saves the state where the block, which reports progress, cancels the run. `done`: steps of this segment."""
        try:
            yield
        except self._cancelled_by:
            if done != self._saved_steps:
                self._save(done, samples, outputs)
            raise

    def finish_segment(self, latents: torch.Tensor) -> None:
        self.segments.append(latents)
        self._saved_steps = 0

    def remove(self) -> None:
        """Removes the file, after the output is at its place."""
        if is_first_host():
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)

    def _save(self, done: int, samples: Sequence[jax.Array], outputs: Sequence[jax.Array]) -> bool:
        """Whether it was saved. A run that is computed need not fail because its copy cannot be written."""
        if not is_first_host():
            return True
        tensors = _number("segments", self.segments)
        tensors |= _number("samples", to_host(list(samples))) | _number("outputs", to_host(list(outputs)))
        progress = {"segment": str(len(self.segments)), "done": str(done), "digest": _digest(tensors)}
        content = save(tensors, {**self._description, **progress})
        try:
            with (
                atomic.replacing(self.path, field="checkpoint", follows_links=False) as partial,
                atomic.write_errors(self.path, field="checkpoint"),
            ):
                _write(partial, content)
            self._upload(self.path)
        except ComfyTpuError as error:
            if not self._warned:
                self._warned = True
                logger.warning("step %d was not saved, and the run goes on: %s", done, error)
            return False
        self._saved_steps = done
        return True

    def _find(self) -> bool | None:
        """Whether there is a state of the same request; None: there is not, and a message says why."""
        if not self.path.exists():
            return None
        try:
            metadata = self._read_metadata()
            known = {name: value for name, value in metadata.items() if name not in _PROGRESS}
            if known != self._description:
                what = ", ".join(_differences(known, self._description))
                logger.warning(
                    "%s is of another run (%s), and this one begins at the first step", self._shown_path, what
                )
                return None
            metadata, tensors = _read(self.path, self._shown_path)
            self._check_state(metadata, tensors)
        except CheckpointError as error:
            logger.warning("%s, so this run begins at the first step and replaces it", error)
            return None
        return True

    def _check_state(self, metadata: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> None:
        try:
            segment, done = int(metadata["segment"]), int(metadata["done"])
            is_whole = metadata["digest"] == _digest(tensors)
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{self._shown_path} is damaged ({error!r})") from error
        counts = [len(_numbered(tensors, name)) for name in ("segments", "samples", "outputs")]
        if not is_whole or counts[0] != segment or not all(counts[1:]) or not 1 <= done <= self._steps:
            raise CheckpointError(f"{self._shown_path} is damaged")

    def _read_metadata(self) -> dict[str, str]:
        """Empty where there is no file."""
        if not self.path.exists():
            return {}
        metadata = _open(self.path, lambda file: file.metadata() or {}, self._shown_path)
        if metadata.get("artifact") != STAGE:
            raise InvalidValueError(
                f"checkpoint={self._shown_path} would be replaced, and is not one of comfy-tpu's; move it away, or "
                "choose another output",
                field="checkpoint",
            )
        return dict(metadata)


def _differences(found: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """What differs, in words; the embeddings only where nothing that they are made of does."""
    names = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
    if "settings" in names:
        old, new = (_read_settings(each.get("settings", "")) for each in (found, expected))
        names.remove("settings")
        names += sorted(name for name in {*old, *new} if old.get(name) != new.get(name) and name not in names)
    names = [name for name in names if name != "embeddings"] or names
    return [f"another {_NAMES.get(name, name)}" for name in names]


def _read_settings(text: str) -> dict[str, Any]:
    try:
        settings = parse_json(text)
    except ValueError:
        return {}
    return settings if isinstance(settings, dict) else {}


def _read(path: Path, shown: str = "") -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    def read(file: Any) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
        # Copies: the next save replaces the file that they would stay mapped to.
        return dict(file.metadata() or {}), {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118

    return _open(path, read, shown)


def _open(path: Path, read: Callable[[Any], Any], shown: str) -> Any:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return read(file)
    except SAFETENSORS_ERRORS as error:
        raise CheckpointError(f"{shown or path} is damaged ({error})") from error


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # a machine may lose its power right after the file gets its name


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """115 MB, the state of a video of 1280×720×81, take 0.3 s of a core."""
    digest = hashlib.blake2b(digest_size=32)
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _number(name: str, tensors: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{name}.{number}": tensor.contiguous() for number, tensor in enumerate(tensors)}


def _numbered(tensors: Mapping[str, torch.Tensor], name: str) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    while (key := f"{name}.{len(found)}") in tensors:
        found.append(tensors[key])
    return found
