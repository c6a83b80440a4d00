"""Reuse curves: how a model's velocity changes along a run, by which steps are chosen for reuse.

A curve is a JSON file, `reuse.json` in the model directory, written by `comfy-tpu calibrate`:

    format       1
    family       of the model
    fingerprint  of the model it was measured on; null for published curves, which stand for every model of that size
    sigmas       falling: the noise left at each step
    ratios       magnitude of the velocity at a step over that at the step before; the first is 1
    changes      what is left of the velocity's difference once the one before is scaled by the ratio, relative to its
                 magnitude; the first is 0
    made_with    for people: settings and prompts, or where the numbers were published

A curve is a function of sigma, not of step numbers, so that it holds for another number of steps or flow shift: between
two sigmas ratios multiply and changes add up.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from comfy_tpu.errors import CheckpointError, InvalidValueError
from comfy_tpu.json_input import read_json
from comfy_tpu.pipeline import atomic
from comfy_tpu.pipeline.model_files import ModelFiles

CURVE_FILE = "reuse.json"
FORMAT = 1
PUBLISHED_DIRECTORY = Path(__file__).parents[1] / "assets" / "reuse"

_KEYS = {"format", "family", "fingerprint", "sigmas", "ratios", "changes", "made_with"}


@dataclasses.dataclass(frozen=True)
class Curve:
    sigmas: np.ndarray
    ratios: np.ndarray
    changes: np.ndarray

    def __post_init__(self) -> None:
        shapes = {array.shape for array in (self.sigmas, self.ratios, self.changes)}
        if len(shapes) != 1 or self.sigmas.ndim != 1 or len(self.sigmas) < 2:
            raise ValueError(f"sigmas, ratios and changes are lists of one length from 2, got {sorted(shapes)}")
        if not all(np.isfinite(array).all() for array in (self.sigmas, self.ratios, self.changes)):
            raise ValueError("a number is NaN or infinite")
        if (np.diff(self.sigmas) >= 0).any() or self.sigmas[0] > 1 or self.sigmas[-1] < 0:
            raise ValueError("sigmas do not fall within 1 to 0")
        if (self.ratios <= 0).any() or (self.changes < 0).any():
            raise ValueError("a ratio is not over 0, or a change is under 0")

    def resample(self, sigmas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ratios and changes from each of these sigmas to the next; the first are 1 and 0."""
        levels = self._accumulate(np.log(self.ratios), sigmas)
        travelled = self._accumulate(self.changes, sigmas)
        return np.exp(np.diff(levels, prepend=levels[:1])), np.diff(travelled, prepend=travelled[:1])

    def _accumulate(self, steps: np.ndarray, sigmas: np.ndarray) -> np.ndarray:
        """The sum of `steps` up to each sigma, extrapolated linearly beyond the ends."""
        known, total = self.sigmas, np.cumsum(steps)
        slope = np.diff(total) / np.diff(known)
        ends = (total[-1] - slope[-1] * known[-1], total[0] + slope[0] * (1 - known[0]))
        return np.interp(sigmas, [-1e-6, *known[::-1], 1 + 1e-6], [ends[0], *total[::-1], ends[1]])


def find_curve(files: ModelFiles) -> Curve:
    """The curve of the model directory, else the published one of the model's size."""
    path = _find_file(files)
    if path is None:
        raise InvalidValueError(
            f"reuse needs to know how much the steps of model {files.name} differ, and there is no "
            f"{_own_file(files)}; run `comfy-tpu calibrate {files.name}` once, or leave reuse at 0",
            field="reuse",
        )
    return _read(path, files, files.fingerprint if path == _own_file(files) else None)


def has_curve(files: ModelFiles) -> bool:
    return _find_file(files) is not None


def _find_file(files: ModelFiles) -> Path | None:
    if (own := _own_file(files)).exists():
        return own
    config = files.config(files.family.transformer)
    for name, facts in files.family.card.reuse_curves.items():
        if all(config.get(key) == value for key, value in facts.items()):
            return PUBLISHED_DIRECTORY / name
    return None


def _own_file(files: ModelFiles) -> Path:
    return files.directory / CURVE_FILE


def save_curve(path: Path, curve: Curve, *, family: str, fingerprint: str | None, made_with: Mapping[str, Any]) -> None:
    document: dict[str, Any] = {"format": FORMAT, "family": family, "fingerprint": fingerprint}
    for name in ("sigmas", "ratios", "changes"):
        document[name] = [round(float(value), 5) for value in getattr(curve, name)]
    document["made_with"] = made_with
    lines = [f'"{name}": {json.dumps(value, ensure_ascii=False)}' for name, value in document.items()]  # a list is one
    content = "{\n" + ",\n".join(lines) + "\n}"
    with atomic.replacing(path) as partial, atomic.write_errors(path):
        partial.write_text(content + "\n", encoding="utf-8")


def _read(path: Path, files: ModelFiles, fingerprint: str | None) -> Curve:
    try:
        document = read_json(path)
        if not isinstance(document, dict) or set(document) != _KEYS:
            raise ValueError(f"expected an object with {', '.join(sorted(_KEYS))}")
        if document["format"] != FORMAT:
            raise ValueError(f"format is {document['format']!r}, this version reads {FORMAT}")
        curve = Curve(*(np.array(document[name], np.float64) for name in ("sigmas", "ratios", "changes")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} is not as comfy-tpu writes it ({error}); make it again with `comfy-tpu calibrate {files.name}`"
        ) from error
    if (document["family"], document["fingerprint"]) != (files.family.name, fingerprint):
        raise InvalidValueError(
            f"{path} was measured on another model ({document['family']}, {document['fingerprint']}), this is "
            f"{files.name} ({files.family.name}, {fingerprint}); run `comfy-tpu calibrate {files.name}`"
        )
    return curve
