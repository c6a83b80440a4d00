"""What `port new` learns of a small PixArt-Sigma pipeline, once for all tests of a file."""

import functools
from typing import Any

from comfy_tpu.porting.scaffold.facts import Facts, default_settings
from comfy_tpu.porting.scaffold.learner import PipelineCalls, learn_calls
from comfy_tpu.porting.scaffold.pipelines import Source, find_source
from comfy_tpu.porting.scaffold.proposal import propose_sharding
from comfy_tpu.porting.scaffold.small_pipeline import build_small_pipeline, shrink_configs


@functools.cache
def pixart() -> tuple[Source, Any]:
    source = find_source("PixArtSigmaPipeline")
    return source, build_small_pipeline(source, shrink_configs(source))


@functools.cache
def pixart_calls() -> PipelineCalls:
    return learn_calls(*pixart())


def make_facts(name: str, package: str) -> Facts:
    source, pipeline = pixart()
    calls = pixart_calls()
    proposal = propose_sharding(source, pipeline.transformer, calls.transformer_call.given)
    configs, defaults = shrink_configs(source), default_settings(source, calls)
    return Facts(name, package, source, calls, proposal, configs, "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS", defaults)
