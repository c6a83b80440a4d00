"""Modules with random weights: the classes of diffusers and transformers, made on the device that runs them.

The weights of a 14B never exist on the host. Our program is loaded from the same module
(`compiler.host_weights.HostWeights`), so that every peer has the same numbers.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from comfy_tpu.bench.machine import Bench, disable_tf32, free_device_memory, relative_error
from comfy_tpu.bench.results import Row
from comfy_tpu.bench.timing import MeasureError, Prepare, measure_peers
from comfy_tpu.bridge import build_skeleton
from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.compiler.host_weights import HostWeights
from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.card import Config
from comfy_tpu.pipeline.model_files import ModelFiles
from comfy_tpu.quiet import quiet

PROMPT = "a red circle moving right on a black background"
_PROMPT_LENGTH = 4096
_CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
_SEED = 0

Build = Callable[[ComponentSpec, Config], torch.nn.Module]


def build_published(spec: ComponentSpec, config: Config) -> torch.nn.Module:
    """The class that the component's config.json names, unmodified."""
    with quiet():
        import diffusers
        import transformers

    name, own = spec.classes[0], copy.deepcopy(dict(config))
    if found := getattr(diffusers, name, None):
        module: torch.nn.Module = found.from_config(own)
    elif found := getattr(transformers, name, None):
        module = found(found.config_class(**own))
    elif type(module := build_ours(spec, config)).__name__ != name:  # some are found in a pipeline's own folder only
        raise UnsupportedError(f"neither diffusers nor transformers has {name}, the class of the {spec.name}")
    return module


def build_ours(spec: ComponentSpec, config: Config) -> torch.nn.Module:
    """The module that our programs are traced from, before its layers are stacked."""
    return spec.build(copy.deepcopy(dict(config)))


def empty_module(spec: ComponentSpec, config: Config, build: Build = build_published) -> torch.nn.Module:
    """Without weights, to count operations."""
    return build_skeleton(lambda: build(spec, config))


def random_module(
    spec: ComponentSpec, config: Config, *, device: torch.device, dtype: torch.dtype, build: Build = build_published
) -> torch.nn.Module:
    """The peers' module of a component. Weights that diffusers keeps in float32 are float32."""
    module = empty_module(spec, config, build)
    kept = set(getattr(module, "_keep_in_fp32_modules", None) or ()) if build is build_published else set()
    generator = torch.Generator(device=device).manual_seed(_SEED)
    made: dict[int, torch.nn.Parameter] = {}
    with torch.no_grad():
        for path, owner in module.named_modules():
            for name, parameter in owner._parameters.items():
                if parameter is None:
                    continue
                full = f"{path}.{name}" if path else name
                if id(parameter) not in made:  # one object for tied weights
                    own = torch.float32 if kept.intersection(full.split(".")) else dtype
                    empty = torch.empty(parameter.shape, device=device, dtype=own)
                    made[id(parameter)] = torch.nn.Parameter(_fill(full, empty, generator), requires_grad=False)
                owner._parameters[name] = made[id(parameter)]
            for name, buffer in owner._buffers.items():
                if buffer is not None and buffer.is_meta:
                    # Statistics: a deviation of zero would leave nothing to compare.
                    value = 1 if name.endswith(("std", "var")) else 0
                    owner._buffers[name] = torch.full_like(buffer, value, device=device)
    return move_buffers(module, device).eval()


def _fill(name: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Values whose activations neither vanish nor explode over forty layers: the errors should mean something."""
    if name.endswith("bias"):
        return tensor.normal_(0, 0.02, generator=generator)
    if tensor.ndim == 1 or name.endswith("gamma"):  # the scale of a norm
        return tensor.normal_(1, 0.1, generator=generator)
    return tensor.normal_(0, math.prod(tensor.shape[1:]) ** -0.5, generator=generator)


def move_buffers(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """The module, its buffers that have values on the device."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and not buffer.is_meta:
                owner._buffers[name] = buffer.to(device)
    return module


def float32_copy(
    module: torch.nn.Module, spec: ComponentSpec, config: Config, build: Build = build_published
) -> torch.nn.Module:
    """The same numbers in float32: every output is compared with this module's."""
    reference = move_buffers(empty_module(spec, config, build), next(module.parameters()).device)
    tensors = module.state_dict().items()
    floats = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors}
    reference.load_state_dict(floats, assign=True)
    return reference.eval().requires_grad_(False)


def count_operations(module: torch.nn.Module, call: Callable[[Any], Any]) -> float | None:
    """Products, convolutions and attention of `call(module)` by torch's own counter, without weights: `call` makes meta
    inputs. None where the module looks at values, which meta tensors do not have, or diffusers has no such call."""
    from torch.utils.flop_counter import FlopCounterMode

    module = module.to("meta")
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            call(module)
    except (NotImplementedError, RuntimeError, ValueError):
        return None
    return float(counter.get_total_flops())


def measure_module(
    bench: Bench,
    row: Row,
    *,
    spec: ComponentSpec,
    module: torch.nn.Module,
    call: Callable[..., torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    ours: Prepare,
    compile_call: Callable[[], Callable[..., torch.Tensor]],
    build: Build = build_published,
    comparable: Callable[[torch.Tensor], torch.Tensor] = lambda output: output,
) -> None:
    """Emits the rows of `call(module, **inputs)` by every peer: times, operations, error against the same in float32.

    `compile_call` makes `call` of the module with that under torch.compile which its users compile. `comparable` is
    the part of an output that is compared.
    """
    config = bench.model.config(spec)
    meta = {name: tensor.to("meta") for name, tensor in inputs.items()}
    flops = count_operations(empty_module(spec, config, build), lambda empty: call(empty, **meta))
    measure_error: MeasureError | None = None
    try:
        with torch.no_grad(), disable_tf32():
            floats = {name: each.float() if each.is_floating_point() else each for name, each in inputs.items()}
            expected = comparable(call(float32_copy(module, spec, config, build), **floats))
        measure_error = lambda output: relative_error(comparable(output), expected)  # noqa: E731
    except (torch.OutOfMemoryError, UnsupportedError) as error:
        bench.emit(f"no error is measured: there is no float32 reference ({str(error).splitlines()[0]})")
    free_device_memory()
    measure_peers(
        bench,
        dataclasses.replace(row, flops=flops, facts=bench.mesh_facts),
        ours={"ours": ours},
        by_torch={
            "eager": lambda: functools.partial(call, module, **inputs),
            "compile": lambda: functools.partial(compile_call(), **inputs),
        },
        measure_error=measure_error,
    )
    free_device_memory()


@dataclasses.dataclass(frozen=True)
class RandomFiles(ModelFiles):
    """A model directory that is not on a disk: random weights, and a tokenizer that knows the words of one prompt."""

    bench: Bench

    @classmethod
    def make(cls, bench: Bench) -> RandomFiles:
        name = f"{bench.model.name} with random weights"
        return cls(name, Path(name), bench.model.family, {}, bench)

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
        return dict(self.bench.model.config(spec))

    def checkpoint(self, spec: ComponentSpec) -> Any:
        return HostWeights(self.module(spec))

    def _read_tokenizer(self, folder: str, may_be_plain: bool) -> Any:
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
            chat_template=_CHAT_TEMPLATE,
            model_max_length=lengths[folder] or _PROMPT_LENGTH,
        )

    @property
    def defaults(self) -> GenerationSettings:
        return self.bench.model.defaults

    @functools.cached_property
    def fingerprint(self) -> str:
        return "random"
