"""The operators of a model, and who implements each in JAX."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from comfy_tpu.errors import UnsupportedError
from comfy_tpu.porting.small_models import make_small_model
from comfy_tpu.porting.targets import Target
from comfy_tpu.porting.trial import Trial, try_operators

By = Literal["torchax", "comfy-tpu", "missing"]


@dataclasses.dataclass(frozen=True, order=True)
class Operator:
    name: str
    by: By
    how: str
    """`lowering`, `decomposition`, `override`, `view`; for a missing one the line that calls it."""


def operators_of(
    target: Target, *, config: Mapping[str, Any] | None = None, inputs: Mapping[str, Any] | None = None
) -> tuple[list[Operator], str | None]:
    """The operators, and the place and reason where the list ends early."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trial = try_operators(make_small_model(target, config=config, inputs=inputs))
    if trial.refusal is not None:
        raise UnsupportedError(trial.refusal)
    return operators_in(trial), trial.operators_end


def operators_in(trial: Trial) -> list[Operator]:
    ours = {"override", "view"}
    found = [Operator(row.name, "comfy-tpu" if row.kind in ours else "torchax", row.kind) for row in trial.rows]
    for name, place in trial.missing.items():
        found.append(Operator(name, "missing", f"{place[0]}:{place[1]}" if place else ""))
    return sorted(found)
