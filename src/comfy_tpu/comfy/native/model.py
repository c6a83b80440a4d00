"""MODEL: the diffusion model's forward, replaced on a clone by the same forward traced and run on the devices."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from typing import TYPE_CHECKING, Any

import torch
from comfy.patcher_extension import WrappersMP

from comfy_tpu.comfy.native.attention import Attention
from comfy_tpu.comfy.native.hosting import Choices, Fallback, host_of
from comfy_tpu.comfy.native.texts import fill_texts, filled_texts, in_prompts
from comfy_tpu.comfy.run import at_rest

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

HARMLESS = frozenset(
    {
        # Read by samplers, wrappers and patches, never by a model's forward.
        "cond_or_uncond",
        "uuids",
        "sigmas",
        "sample_sigmas",
        "wrappers",
        "callbacks",
        "easycache",
        # Written by the forward itself.
        "total_blocks",
        "block_type",
        "block_index",
        "block",
        "transformer_index",
        "original_shape",
    }
)
PASSED_ON = frozenset({"rope_options"})
"""Numbers that a forward reads."""


def compile_model(model: ModelPatcher, choices: Choices) -> ModelPatcher:
    """A clone whose diffusion model computes on the devices."""
    clone = model.clone()
    module = clone.get_model_object("diffusion_model")
    name = "_forward" if hasattr(type(module), "_forward") else "forward"
    forward = DeviceForward(clone.model, module, name, choices)
    clone.add_object_patch(f"diffusion_model.{name}", forward)
    clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "comfy_tpu", forward.around_sampling)
    # ComfyUI runs the prompt and the negative prompt in one batch if the host has the memory free that a step would
    # take there. It takes none there, and a batch that depends on free memory would be compiled twice.
    clone.add_object_patch("memory_required", lambda *args, **kwargs: 0)
    return clone


class DeviceForward:
    """Stands for `module._forward`."""

    def __init__(self, model: torch.nn.Module, module: torch.nn.Module, name: str, choices: Choices) -> None:
        # Weakly: we are an attribute of the module ourselves, and ComfyUI takes a cycle for a leak.
        self._model = weakref.ref(model)
        self._reference = weakref.ref(module)
        self._name = name
        self._choices = choices
        self._signature = inspect.signature(getattr(type(module), name))
        self._fallback = Fallback(type(module).__name__)

    @property
    def _module(self) -> torch.nn.Module:
        module = self._reference()
        assert module is not None  # it is the one that calls us
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceForward:
        return self  # a skeleton is copied while we are on the module, and does not use us

    def around_sampling(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """However the sampler ends: nothing is computed afterwards."""
        try:
            return executor(*args, **kwargs)
        finally:
            host_of(self._module, self._choices).end_steps()
            at_rest()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(self._module, *args, **kwargs)
        if reason := self._reason_against(bound.arguments.get("transformer_options") or {}):
            self._fallback.explain(reason)
        else:
            given = frozenset(name for name, value in bound.arguments.items() if value is not None)
            traced, result = self._fallback.attempt(given, lambda: self._on_devices(bound))
            if traced:
                return result
        return getattr(type(self._module), self._name)(self._module, *args, **kwargs)

    def _on_devices(self, bound: inspect.BoundArguments) -> torch.Tensor:
        host = host_of(self._module, self._choices)
        arguments = dict(bound.arguments)
        module_name, sample_name, time_name, *_ = arguments
        del arguments[module_name]
        options = arguments.pop("transformer_options", None) or {}
        sample = arguments[sample_name]
        times = arguments.pop(time_name)
        arguments = {**_cast(arguments, host.dtype), time_name: times}
        host.size = "×".join(str(side) for side in reversed(sample.shape[2:]))
        passed = {name: value for name, value in options.items() if name in PASSED_ON}
        host.begin_step(*_step(options))

        def run(part: dict[str, Any]) -> torch.Tensor:
            return host(_functions[self._name], *fill_texts(self._module, part), passed)

        prompts = len(options.get("cond_or_uncond", ()))
        return in_prompts(self._module, arguments, prompts, run).to(sample.dtype)

    def _reason_against(self, options: dict[str, Any]) -> str:
        """Why this call cannot be traced, or nothing."""
        for name, value in options.items():
            if name in HARMLESS or name in PASSED_ON:
                continue
            if name in ("patches", "patches_replace"):
                value = {kind: inner for kind, inner in value.items() if inner}
            if value:
                inside = f" ({', '.join(map(str, value))})" if isinstance(value, dict) else ""
                return f"transformer_options hold {name}{inside}, which is code that cannot be compiled with the model"
        patcher = getattr(self._model(), "current_patcher", None)
        if patcher is not None:
            own = f"diffusion_model.{self._name}"
            others = [name for name in patcher.object_patches if name.startswith("diffusion_model") and name != own]
            if others:
                return f"another node replaced {', '.join(others)}"
            if patcher.current_hooks is not None:
                return "weights are hooked to the prompt or the step, and change while the sampler runs"
        return ""


def _forward(module: Any, *inputs: Any) -> torch.Tensor:
    return _call(module, "_forward", *inputs)


def _plain_forward(module: Any, *inputs: Any) -> torch.Tensor:
    return _call(module, "forward", *inputs)


_functions = {"_forward": _forward, "forward": _plain_forward}


def _call(
    module: Any, name: str, arguments: dict[str, Any], counts: tuple[torch.Tensor, ...], options: dict[str, Any]
) -> torch.Tensor:
    # The class's own: the skeleton may have our replacement on it.
    function = getattr(type(module), name)
    keywords = dict(arguments)
    rest = keywords.pop("kwargs", {})  # what the model takes beyond its named parameters
    texts = filled_texts(module, arguments, counts)
    options = {**options, "optimized_attention_override": Attention(texts)}
    with texts.means(module) if texts else contextlib.nullcontext():
        return function(module, **keywords, **rest, transformer_options=options)


def _step(options: dict[str, Any]) -> tuple[int, int]:
    """Which step of how many, as far as the sampler tells."""
    steps, now = options.get("sample_sigmas"), options.get("sigmas")
    if steps is None or now is None or len(steps) < 2:
        return 0, 0
    return int((steps[:-1] - now.flatten()[0]).abs().argmin()), len(steps) - 1


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    """Floating tensors in the model's dtype, in nested containers."""
    if isinstance(tree, torch.Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if isinstance(tree, dict):
        return {name: _cast(value, dtype) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_cast(value, dtype) for value in tree)
    return tree
