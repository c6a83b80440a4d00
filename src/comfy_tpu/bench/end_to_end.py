"""From a prompt to frames on the host: our pipeline and diffusers' own, with the same random weights.

torch.compile is given the transformer, as its users do; text encoders and VAE are a small part of the time.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from comfy_tpu.bench.job import Job
from comfy_tpu.bench.machine import Bench
from comfy_tpu.bench.models import count_step_operations
from comfy_tpu.bench.random_modules import PROMPT, RandomFiles
from comfy_tpu.bench.results import Emit, Row
from comfy_tpu.bench.timing import Candidate, compile_module, measure_peers
from comfy_tpu.compiler.residency import Residency
from comfy_tpu.config import FAST, FastSettings, GenerationSettings, ResidencyConfig, RuntimeConfig
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.pipeline.running_model import RunningModel
from comfy_tpu.pipeline.step import is_guided
from comfy_tpu.pipeline.video import VideoPipeline
from comfy_tpu.quiet import quiet

_REPEATS = 2
"""At most: a sample is a whole video."""


def measure_end_to_end(job: Job, emit: Emit) -> None:
    bench = Bench.open(job, emit)
    model = bench.model
    image = model.family.card.image
    if image is not None and image.required:
        raise UnsupportedError(f"model={model.name} begins with an image, which this part does not give; leave it out")
    files = RandomFiles.make(bench)
    settings = model.settings(job.size, num_inference_steps=job.steps)
    work = model.workload(settings)
    row = Row(
        "end-to-end",
        job.name_with_backend(f"{job.steps} steps{' with guidance' if is_guided(model.family, settings) else ''}"),
        "",
        size=job.size,
        flops=job.steps * sum(count_step_operations(work)),  # of the transformer alone
        facts={"steps": job.steps, "tokens": work.tokens, **bench.mesh_facts},
    )
    transformer: Any = files.module(model.family.transformer)
    stacks = [stack.path for stack in model.family.transformer.stacks if "." not in stack.path]
    parts = stacks if job.regional else ()
    measure_peers(
        bench,
        row,
        ours={
            "ours": lambda: _ours(bench, files, settings, row.facts),
            "fast": lambda: _ours(bench, files, settings, row.facts, FAST),
        },
        by_torch={
            "eager": lambda: _diffusers_call(files, transformer, settings),
            "compile": lambda: _diffusers_call(files, compile_module(transformer, parts), settings),
        },
        sdpa=bench.default_attention,
        repeats=min(job.repeats, _REPEATS),
    )


def _ours(
    bench: Bench,
    files: RandomFiles,
    settings: GenerationSettings,
    facts: Mapping[str, Any],
    fast: FastSettings | None = None,
) -> Candidate:
    dtype = str(bench.dtype).removeprefix("torch.")
    runtime = RuntimeConfig(dtype=dtype, fast=fast, cache=bench.cache, vae_backend=bench.job.vae_backend)
    running = RunningModel(files, bench.placement, runtime, residency=Residency(ResidencyConfig()))
    pipeline, own = VideoPipeline(running), dict(facts)
    if fast is not None:
        chosen = {name: value for name, value in dataclasses.asdict(settings).items() if not hasattr(fast, name)}
        settings = pipeline.settings(**chosen)
        lossy = {name: getattr(settings, name) for name in dataclasses.asdict(fast)}
        own |= {**lossy, "quantize": running.quantize, "forwards": pipeline.plan(settings).forwards}
    return Candidate(lambda: torch.cat(list(pipeline.generate(PROMPT, settings)), dim=1), facts=own)


def _diffusers_call(files: RandomFiles, transformer: Any, settings: GenerationSettings) -> Callable[[], torch.Tensor]:
    pipeline = _diffusers_pipeline(files, transformer, settings)
    wanted = {
        "prompt": PROMPT,
        "negative_prompt": settings.negative_prompt if is_guided(files.family, settings) else None,
        "height": settings.height,
        "width": settings.width,
        "num_frames": settings.num_frames,
        "num_inference_steps": settings.num_inference_steps,
        "guidance_scale": settings.guidance_scale,
        "max_sequence_length": settings.max_sequence_length,
        "frame_rate": settings.fps,
        "output_type": "pt",
    }
    known = inspect.signature(pipeline.__call__).parameters
    options = {name: value for name, value in wanted.items() if name in known}

    def call() -> torch.Tensor:
        made = pipeline(**options, generator=torch.Generator().manual_seed(settings.seed))
        frames: torch.Tensor = made.images if files.family.card.makes_images else made.frames
        return frames.float().cpu()

    return call


def _diffusers_pipeline(files: RandomFiles, transformer: Any, settings: GenerationSettings) -> Any:
    """The pipeline class of the model, given by name the parts that its constructor takes."""
    with quiet():
        import diffusers

    family = files.family
    pipeline_class = getattr(diffusers, family.card.pipeline_classes[0], None)
    if pipeline_class is None:
        raise UnsupportedError(f"diffusers has no {family.card.pipeline_classes[0]} to compare with")
    parameters = inspect.signature(pipeline_class.__init__).parameters
    required = [name for name, each in parameters.items() if each.default is each.empty and name != "self"]
    given: dict[str, Any] = {
        **{spec.name: files.module(spec) for spec in family.components if spec.name in parameters},
        **{encoder.tokenizer: files.tokenizer(encoder.tokenizer) for encoder in family.text.encoders},
        "transformer": transformer,
        "scheduler": files.scheduler(settings),
        "boundary_ratio": settings.boundary or None,
    }
    if "guider" in parameters:
        given["guider"] = diffusers.ClassifierFreeGuidance(guidance_scale=settings.guidance_scale)
    kept = {name: value for name, value in given.items() if name in parameters}
    pipeline: Any = pipeline_class(**{**dict.fromkeys(required), **kept})
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
