"""From a prompt to frames on the host: our pipeline and diffusers' WanPipeline, with the same random weights.

torch.compile is given the transformer, as its users do; text encoder and VAE are a small part of the time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from comfy_tpu.bench.devices import Bench
from comfy_tpu.bench.flops import transformer_operations
from comfy_tpu.bench.job import Job
from comfy_tpu.bench.peers import chosen, compiled, torch_entrant
from comfy_tpu.bench.references import random_module
from comfy_tpu.bench.results import Row
from comfy_tpu.bench.timing import Entrant, Listener, Prepare, race
from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.compiler.host_weights import HostWeights
from comfy_tpu.compiler.residency import Residency
from comfy_tpu.config import GenerationSettings, ResidencyConfig, RuntimeConfig
from comfy_tpu.families.wan.model import WAN21
from comfy_tpu.pipeline.model_files import ModelFiles
from comfy_tpu.pipeline.running_model import RunningModel
from comfy_tpu.pipeline.video import VideoPipeline

PROMPT = "a red circle moving right on a black background"
_REPEATS = 2
"""At most: a sample is a whole video."""


@dataclasses.dataclass(frozen=True)
class RandomFiles(ModelFiles):
    """A model directory that is not on a disk: weights are those of modules that are there already."""

    modules: Mapping[str, torch.nn.Module]
    configurations: Mapping[str, Mapping[str, Any]]
    words: Any

    def config(self, spec: ComponentSpec) -> dict[str, Any]:
        return dict(self.configurations[spec.name])

    def checkpoint(self, spec: ComponentSpec) -> Any:
        return HostWeights(self.modules[spec.name])

    def tokenizer(self, folder: str) -> Any:
        return self.words

    @property
    def defaults(self) -> GenerationSettings:
        return self.family.card.defaults

    @functools.cached_property
    def fingerprint(self) -> str:
        return "random"


def measure_end_to_end(job: Job, listener: Listener) -> None:
    bench = Bench.open(job)
    files = random_files(bench, job)
    size, steps = job.video_size, job.steps
    settings = GenerationSettings(
        height=size.height,
        width=size.width,
        num_frames=size.frames,
        num_inference_steps=steps,
        max_sequence_length=job.configurations.text_tokens,
    )
    operations = transformer_operations(job.configurations.transformer, size.tokens, job.configurations.text_tokens)
    row = Row(
        "end-to-end",
        f"{steps} steps with guidance",
        "",
        size=job.size,
        flops=2 * steps * operations.total,  # of the transformer alone
        facts={"steps": steps, "tokens": size.tokens},
    )
    transformer: Any = files.modules["transformer"]
    peers: dict[str, Prepare] = {
        "ours": lambda: _ours(bench, files, settings, row.facts),
        "eager": lambda: _by_torch(bench, files, transformer, settings, row.facts),
        "compile": lambda: _by_torch(
            bench, files, compiled(transformer, ("blocks",) if job.regional else ()), settings, row.facts
        ),
    }
    race(row, chosen(job, peers), repeats=min(job.repeats, _REPEATS), listener=listener)


def random_files(bench: Bench, job: Job) -> RandomFiles:
    models = job.configurations
    configurations = {"transformer": models.transformer, "text_encoder": models.text_encoder, "vae": models.vae}
    modules = {
        spec.name: random_module(spec, configurations[spec.name], device=bench.device, dtype=bench.dtype)
        for spec in WAN21.components
    }
    name = f"{job.model} model with random weights"
    return RandomFiles(name, Path(name), WAN21, {}, modules, configurations, _tokenizer(models.text_tokens))


def _ours(bench: Bench, files: RandomFiles, settings: GenerationSettings, facts: Mapping[str, Any]) -> Entrant:
    runtime = RuntimeConfig(dtype=str(bench.dtype).removeprefix("torch."), cache=bench.cache)
    running = RunningModel(files, bench.placement, runtime, residency=Residency(ResidencyConfig()))
    pipeline = VideoPipeline(running)
    return Entrant(lambda: torch.cat(list(pipeline.generate(PROMPT, settings)), dim=1), facts=dict(facts))


def _by_torch(
    bench: Bench, files: RandomFiles, transformer: Any, settings: GenerationSettings, facts: Mapping[str, Any]
) -> Entrant:
    from diffusers import WanPipeline

    pipeline = WanPipeline(
        tokenizer=files.words,
        text_encoder=files.modules["text_encoder"],
        transformer=transformer,
        vae=files.modules["vae"],
        scheduler=files.schedulers[settings.scheduler](settings),
    )
    pipeline.set_progress_bar_config(disable=True)

    def call() -> torch.Tensor:
        frames: torch.Tensor = pipeline(
            PROMPT,
            negative_prompt=settings.negative_prompt,
            height=settings.height,
            width=settings.width,
            num_frames=settings.num_frames,
            num_inference_steps=settings.num_inference_steps,
            guidance_scale=settings.guidance_scale,
            max_sequence_length=settings.max_sequence_length,
            generator=torch.Generator().manual_seed(settings.seed),
            output_type="pt",
        ).frames
        return frames.float().cpu()

    attention = "CUDNN_ATTENTION" if bench.device.type == "cuda" else ""
    return torch_entrant(bench, call, attention=attention, facts=facts)


def _tokenizer(length: int) -> Any:
    """The words of the prompt and nothing else: no model's vocabulary has to be downloaded to measure its speed."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(["<pad>", "</s>", "<unk>", *dict.fromkeys(PROMPT.split())])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=length
    )
