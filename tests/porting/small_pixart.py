"""What `port new` learns of a small PixArt-Sigma pipeline, once for all tests of a file."""

import functools
from typing import Any

from comfy_tpu.porting.scaffold.facts import Facts, default_settings
from comfy_tpu.porting.scaffold.learning import Learner
from comfy_tpu.porting.scaffold.pipelines import Source, find_source
from comfy_tpu.porting.scaffold.proposing import propose
from comfy_tpu.porting.scaffold.runs import Learned
from comfy_tpu.porting.scaffold.small import small_configs, small_pipeline


@functools.cache
def pixart() -> tuple[Source, Any]:
    source = find_source("PixArtSigmaPipeline")
    return source, small_pipeline(source, small_configs(source))


@functools.cache
def learner() -> tuple[Learner, Learned]:
    found = Learner(*pixart())
    return found, found.learn()


def facts(name: str, package: str) -> Facts:
    source, pipeline = pixart()
    found, learned = learner()
    call, _ = found.calls
    proposal = propose(source, pipeline.transformer, lambda: pipeline.transformer(**call.given))
    configs, defaults = small_configs(source), default_settings(source, learned)
    return Facts(name, package, source, learned, proposal, configs, "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS", defaults)
