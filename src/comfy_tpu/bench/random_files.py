"""A model directory that is not on a disk: random weights, and a tokenizer that knows the words of one prompt."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch

from comfy_tpu.bench.devices import Bench
from comfy_tpu.bench.models import BenchModel
from comfy_tpu.bench.modules import random_module
from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.compiler.host_weights import HostWeights
from comfy_tpu.config import GenerationSettings
from comfy_tpu.pipeline.model_files import ModelFiles

PROMPT = "a red circle moving right on a black background"
_LENGTH = 4096
_TEMPLATE = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"


@dataclasses.dataclass(frozen=True)
class RandomFiles(ModelFiles):
    bench: Bench

    @classmethod
    def make(cls, bench: Bench) -> RandomFiles:
        name = f"{bench.model.name} with random weights"
        return cls(name, Path(name), bench.model.family, {}, bench)

    @property
    def model(self) -> BenchModel:
        return self.bench.model

    def module(self, spec: ComponentSpec) -> torch.nn.Module:
        """The published class with its weights, made when it is first needed."""
        if spec.name not in self._modules:
            self._modules[spec.name] = random_module(
                spec, self.config(spec), device=self.bench.device, dtype=self.bench.dtype
            )
        return self._modules[spec.name]

    @functools.cached_property
    def _modules(self) -> dict[str, torch.nn.Module]:
        return {}

    def config(self, spec: ComponentSpec) -> dict[str, Any]:
        return dict(self.model.config(spec))

    def checkpoint(self, spec: ComponentSpec) -> Any:
        return HostWeights(self.module(spec))

    def _read_tokenizer(self, folder: str) -> Any:
        """No model's vocabulary has to be downloaded to measure its speed."""
        from tokenizers import Tokenizer, models, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast

        lengths = {encoder.tokenizer: encoder.length for encoder in self.family.text.encoders}
        words = ["<pad>", "</s>", "<unk>", *dict.fromkeys(PROMPT.split())]
        tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token="<pad>",
            eos_token="</s>",
            unk_token="<unk>",
            padding_side="right",
            chat_template=_TEMPLATE,
            model_max_length=lengths[folder] or _LENGTH,
        )

    @property
    def defaults(self) -> GenerationSettings:
        return self.model.defaults

    @functools.cached_property
    def fingerprint(self) -> str:
        return "random"
