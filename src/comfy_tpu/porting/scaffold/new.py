"""From a model to a family: find it, run a small one, learn, check, write. Nothing is written before all is known."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable
from typing import Any

from comfy_tpu.bridge import build_skeleton
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.porting.check import Check, corrected, judged, read_source
from comfy_tpu.porting.scaffold.destination import Destination, find_destination
from comfy_tpu.porting.scaffold.facts import Facts, check_sizes, default_settings
from comfy_tpu.porting.scaffold.files import Files
from comfy_tpu.porting.scaffold.learning import Learner
from comfy_tpu.porting.scaffold.pipelines import Source, check_supported, check_unclaimed, find_source, is_hub_id
from comfy_tpu.porting.scaffold.proposing import propose
from comfy_tpu.porting.scaffold.small import small_configs, small_pipeline
from comfy_tpu.porting.scaffold.watching import Call
from comfy_tpu.porting.small_models import SmallModel
from comfy_tpu.porting.targets import find_targets
from comfy_tpu.porting.trial import try_small

Tell = Callable[[str], None]
"""What is being done, for whoever waits."""


@dataclasses.dataclass(frozen=True)
class Scaffold:
    destination: Destination
    facts: Facts
    checks: tuple[Check, ...]
    """The checks of the transformer and the VAE."""
    files: Files
    """Empty if a check is blocked."""

    @property
    def blocked(self) -> bool:
        return any(check.blocked for check in self.checks)


def make_scaffold(
    name: str,
    model: str,
    *,
    into: str | None = None,
    pack: str | None = None,
    model_id: str | None = None,
    writes: bool = True,
    tell: Tell = lambda text: None,
) -> Scaffold:
    """`into`, `pack`: as `find_destination` has them. `writes`: raises InvalidValueError at once if the files cannot be
    written."""
    destination = find_destination(name, into=into, pack=pack)
    destination.check(writes=writes)
    source = find_source(model)
    check_supported(source)
    hub = model_id or source.hub_model
    if hub is None:
        raise InvalidValueError(
            f"model={source.directory or source.name} does not say which model of the hub it is; give --model-id "
            "owner/name",
            field="model",
        )
    if not is_hub_id(hub):
        raise InvalidValueError(f"model_id={hub} is no id of the hub; give owner/name", field="model_id")
    check_unclaimed(source, hub)
    tell(f"a small {source.name}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the model's own, and many
        configs = small_configs(source)
        pipeline = small_pipeline(source, configs)
        tell("watching it run")
        learner = Learner(source, pipeline)
        learned = learner.learn()
        transformer, decode = learner.calls
        tell("trying its transformer and its VAE")
        checks = (
            _checked(source, "transformer", pipeline, "forward", transformer),
            _checked(source, "vae", pipeline, "decode", decode),
        )
        proposal = propose(source, pipeline.transformer, lambda: pipeline.transformer(**transformer.given))
    defaults = default_settings(source, learned)
    facts = Facts(name, destination.package, source, learned, proposal, configs, hub, defaults)
    check_sizes(facts)
    files: Files = {}
    if not any(check.blocked for check in checks):
        tell("writing its files")
        files = destination.files(facts)
    return Scaffold(destination, facts, checks, files)


def _checked(source: Source, part: str, pipeline: Any, method: str, call: Call) -> Check:
    """As `port check` does, on what the pipeline itself gave it."""
    cls, model = source.parts[part], getattr(pipeline, part)
    (target,) = find_targets(cls.__name__)
    config = {key: value for key, value in dict(model.config).items() if key in inspect.signature(cls).parameters}
    given = {**call.given, "return_dict": False}
    small = SmallModel(model, build_skeleton(lambda: cls(**config)), method, given, config)
    findings = read_source(target)
    trial = try_small(small, {each.file for each in findings})
    findings = corrected(findings, trial)
    verdict, why = judged(findings, trial, "")
    return Check(target, verdict, why, tuple(findings), (), (), trial, config)
