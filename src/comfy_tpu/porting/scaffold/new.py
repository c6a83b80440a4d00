"""From a model to a family: find it, run a small one, learn, check, write. Nothing is written before all is known."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

from comfy_tpu.bridge import build_skeleton
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.porting.check import Check, check_small_model
from comfy_tpu.porting.scaffold.destination import Destination, find_destination
from comfy_tpu.porting.scaffold.facts import Facts, check_sizes, default_settings
from comfy_tpu.porting.scaffold.files import Files
from comfy_tpu.porting.scaffold.learner import learn_calls
from comfy_tpu.porting.scaffold.pipeline_run import Call
from comfy_tpu.porting.scaffold.pipelines import Source, check_supported, check_unclaimed, find_source, is_hub_id
from comfy_tpu.porting.scaffold.proposal import propose_sharding
from comfy_tpu.porting.scaffold.small_pipeline import build_small_pipeline, shrink_configs
from comfy_tpu.porting.small_models import SmallModel
from comfy_tpu.porting.targets import find_targets

Tell = Callable[[str], None]
"""Reports the current step to whoever waits."""


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
        configs = shrink_configs(source)
        pipeline = build_small_pipeline(source, configs)
        tell("recording its runs")
        calls = learn_calls(source, pipeline)
        tell("trying its transformer and its VAE")
        checks = (
            _check_part(source, "transformer", pipeline, "forward", calls.transformer_call),
            _check_part(source, "vae", pipeline, "decode", calls.decode_call),
        )
        proposal = propose_sharding(source, pipeline.transformer, calls.transformer_call.given)
    defaults = default_settings(source, calls)
    facts = Facts(name, destination.package, source, calls, proposal, configs, hub, defaults)
    check_sizes(facts)
    files: Files = {}
    if not any(check.blocked for check in checks):
        tell("writing its files")
        files = destination.files(facts)
    return Scaffold(destination, facts, checks, files)


def _check_part(source: Source, part: str, pipeline: Any, method: str, call: Call) -> Check:
    """The check of a part, as `port check` makes it, on the arguments that the pipeline itself gave."""
    cls, model = source.parts[part], getattr(pipeline, part)
    (target,) = find_targets(cls.__name__)
    config = {key: value for key, value in dict(model.config).items() if key in inspect.signature(cls).parameters}
    inputs = {**call.given, "return_dict": False}
    skeleton = build_skeleton(functools.partial(cls, **config))
    return check_small_model(target, SmallModel(model, skeleton, method, inputs, config))
