"""MODEL: runs the diffusion model's forward on the devices, by a patch on a clone."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import comfy.model_management
import torch
from comfy.patcher_extension import WrappersMP

from comfy_tpu.comfy.native.attention import Attention
from comfy_tpu.comfy.native.batch_padding import MAX_WORK, describe_rows, has_independent_rows, pad_rows
from comfy_tpu.comfy.native.block_patches import (
    PATCH_OPTIONS,
    BlockPatches,
    PatchedFunction,
    StateBudget,
    find_patches,
)
from comfy_tpu.comfy.native.constants import WithConstants, bind_constants
from comfy_tpu.comfy.native.foreign_patches import loaded_patcher
from comfy_tpu.comfy.native.hosting import VARYING, Choices, Host, class_title, end_steps, pixel_size
from comfy_tpu.comfy.native.replacement import Fallback, Replacement, current_run, refuse_large
from comfy_tpu.comfy.native.text_padding import describe_padding, pad_texts, run_per_prompt
from comfy_tpu.comfy.run import Outcome, report_idle
from comfy_tpu.errors import UnsupportedError

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

SAMPLER_OPTIONS = frozenset(
    {"cond_or_uncond", "uuids", "sigmas", "sample_sigmas", "wrappers", "callbacks", "easycache", "context_window"}
)
"""Keys of transformer_options that samplers, wrappers and patches read."""
FORWARD_OPTIONS = frozenset(
    {"total_blocks", "block_type", "block_index", "block", "transformer_index", "original_shape", "activations_shape"}
    | {"grid_sizes", "img_slice", "reference_image_num_tokens"}
)
"""Keys of transformer_options that the forward itself writes."""
MODEL_OPTIONS = frozenset({"rope_options", "minimax_h3_sigma_shift_video", "minimax_h3_sigma_shift_audio"})
"""Keys of transformer_options that a forward reads, with numbers as values."""

_KNOWN_OPTIONS = SAMPLER_OPTIONS | FORWARD_OPTIONS | MODEL_OPTIONS | frozenset(PATCH_OPTIONS)


def compile_model(model: ModelPatcher, choices: Choices) -> ModelPatcher:
    """A clone whose diffusion model computes on the devices."""
    clone = model.clone()
    fallback = Fallback(type(clone.model.diffusion_model).__name__, current_run().node)
    if "diffusion_model" in clone.object_patches:
        # Put back in the order of their names, a patch of the whole and one of its method would leave the wrong method.
        reason = "another node replaced diffusion_model"
        fallback.explain(reason)
        refuse_large(clone.model.diffusion_model, clone.load_device, reason, choices)
        return clone
    fallback.clear()
    name = "_forward" if hasattr(type(clone.model.diffusion_model), "_forward") else "forward"
    forward = DeviceForward(clone.model, "diffusion_model", name, choices)
    clone.add_object_patch(f"diffusion_model.{name}", forward)
    clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "comfy_tpu", forward.wrap_sampling)
    # ComfyUI runs the prompt and the negative prompt in one batch if the host has the memory free that a step would
    # take there. It takes none there, and a batch that depends on free memory would be compiled twice.
    clone.add_object_patch("memory_required", lambda *args, **kwargs: 0)
    return clone


class DeviceForward(Replacement):
    """Replaces `diffusion_model._forward`."""

    part = "transformer"

    def __init__(self, owner: torch.nn.Module, path: str, method: str, choices: Choices) -> None:
        super().__init__(owner, path, method, choices)
        self._patch_states = StateBudget()

    def wrap_sampling(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Wraps a sampler's run, and reports its end, also when it fails."""
        self._patch_states.begin_run()
        self._last = None  # weights change between runs: a LoRA
        outcome: Outcome = "failed"
        try:
            result = executor(*args, **kwargs)
            outcome = "done"
            return result
        except comfy.model_management.InterruptProcessingException:
            outcome = "cancelled"
            raise
        finally:
            end_steps(self._module, outcome)
            report_idle()

    def _title(self) -> str:
        return class_title(type(self._owner.model_config).__name__) if hasattr(self._owner, "model_config") else ""

    def _bind_arguments(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The call's arguments by their names, without the module."""
        bound = inspect.signature(self._own_method).bind(self._module, *args, **kwargs)
        _, *names = bound.arguments
        arguments = {name: bound.arguments[name] for name in names}
        rest = arguments.pop("kwargs", {})  # what the model takes beyond its named parameters
        return {**arguments, **rest}

    def _kind(self, *args: Any, **kwargs: Any) -> Hashable:
        arguments = self._bind_arguments(*args, **kwargs)
        patches = _find_patches(arguments)
        names = frozenset(name for name, value in arguments.items() if value is not None)
        return names, None if patches is None else patches.key()

    def _run_on_devices(self, host: Host, *args: Any, **kwargs: Any) -> Any:
        arguments = self._bind_arguments(*args, **kwargs)
        patches = _find_patches(arguments)
        options = arguments.pop("transformer_options", None) or {}
        sample_name, time_name, *_ = arguments
        # A list where sound or keyframes are samples of their own, behind the video.
        sample = next(leaf for leaf in torch.utils._pytree.tree_leaves(arguments[sample_name]))
        uncast = (time_name, "a_timestep")
        arguments = {name: value if name in uncast else _cast(value, host.dtype) for name, value in arguments.items()}
        host.size = pixel_size(sample.shape[2:], *_latent_scale(self._owner))
        passed = {name: value for name, value in options.items() if name in MODEL_OPTIONS}
        host.report_meanwhile(lambda: host.begin_step(*_step(options)))
        if patches is not None:
            # As ComfyUI gives it: a patch may look at all rows and all tokens, so there is no padding.
            others = {name: value for name, value in options.items() if name not in _KNOWN_OPTIONS}
            patched = PatchedFunction(
                bind_constants(self._module, _patched_functions[self._method], arguments),
                patches.key(),
                patches,
                SAMPLER_OPTIONS if patches.in_blocks else SAMPLER_OPTIONS | VARYING,
            )
            return _cast(host.run_patched(patched, arguments, passed | others, device=sample.device), sample.dtype)

        function = bind_constants(self._module, _functions[self._method], arguments)
        if isinstance(function, WithConstants):
            return _cast(host.run_patched(function, arguments, (), passed, device=sample.device), sample.dtype)

        def run(part: dict[str, Any]) -> Any:
            inputs = pad_texts(self._module, part)
            rows = len(part[sample_name])
            signature = describe_rows(inputs, rows) if has_independent_rows(self._module, part) else None
            if signature is None:  # also for a list of samples: no such model is among those with independent rows
                return host(function, *inputs, passed, device=sample.device)

            def run_padded(size: tuple[int, ...]) -> torch.Tensor:
                return host(function, *pad_rows(inputs, rows, *size), passed, device=sample.device)[:rows]

            return host.run_padded((function, signature, repr(passed)), (rows,), run_padded, MAX_WORK)

        prompts = len(options.get("cond_or_uncond", ()))
        return _cast(run_per_prompt(self._module, arguments, prompts, run), sample.dtype)

    def _find_problem(self, *args: Any, **kwargs: Any) -> str:
        options = self._bind_arguments(*args, **kwargs).get("transformer_options") or {}
        return (
            _find_options_problem(options)
            or self._find_replaced_parts()
            or super()._find_problem()
            or self._find_patch_problem(find_patches(options, SAMPLER_OPTIONS))
        )

    def _find_patch_problem(self, patches: BlockPatches | None) -> str:
        if patches is None:
            return ""
        try:
            return self._patch_states.find_problem(patches)
        except UnsupportedError as error:
            return str(error)

    def _find_replaced_parts(self) -> str:
        patcher = loaded_patcher(self._owner)
        own = f"diffusion_model.{self._method}"
        patches = [] if patcher is None else patcher.object_patches
        others = [name for name in patches if name.startswith("diffusion_model") and name != own]
        return f"another node replaced {', '.join(others)}" if others else ""


def _latent_scale(model: Any) -> tuple[int | None, int | None]:
    """Pixels per latent on a side, and frames per latent; None where neither ComfyUI nor a family's card says."""
    from comfy_tpu.families.registry import family_cards

    latent_format = getattr(model, "latent_format", None)
    name = type(latent_format).__name__
    for nodes in (nodes for card in family_cards() for nodes in card.node_sets):
        if nodes.latent_format == name:
            return nodes.models[0].spatial_scale, nodes.models[0].temporal_scale
    return getattr(latent_format, "spacial_downscale_ratio", None), getattr(
        latent_format, "temporal_downscale_ratio", None
    )


def _find_options_problem(options: dict[str, Any]) -> str:
    for name, value in options.items():
        if name in _KNOWN_OPTIONS:
            continue
        if isinstance(value, torch.Tensor) or value:
            inside = f" ({', '.join(map(str, value))})" if isinstance(value, dict) else ""
            return f"transformer_options hold {name}{inside}, which cannot be compiled with the model"
    return ""


class TraceOptions(dict[str, Any]):
    """`transformer_options` for a trace: raises UnsupportedError if the forward reads a key that changes at every
    step."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(_check_option(name))

    def __contains__(self, name: object) -> bool:
        return super().__contains__(_check_option(name))

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(_check_option(name), default)

    def copy(self) -> TraceOptions:
        return TraceOptions(self)


def _check_option(name: Any) -> Any:
    if name in SAMPLER_OPTIONS:
        raise UnsupportedError(f"the model reads {name} among transformer_options, which changes from step to step")
    return name


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
    texts = describe_padding(module, arguments, counts)
    options = TraceOptions(options, optimized_attention_override=Attention(texts))
    with texts.correct_means(module) if texts else contextlib.nullcontext():
        return function(module, **arguments, transformer_options=options)


def _patched_forward(module: Any, *inputs: Any) -> torch.Tensor:
    return _call_patched(module, "_forward", *inputs)


def _patched_plain_forward(module: Any, *inputs: Any) -> torch.Tensor:
    return _call_patched(module, "forward", *inputs)


_patched_functions = {"_forward": _patched_forward, "forward": _patched_plain_forward}


def _call_patched(
    module: Any, name: str, arguments: dict[str, Any], constants: dict[str, Any], options: dict[str, Any]
) -> torch.Tensor:
    given = {**options, **constants, "optimized_attention_override": Attention()}
    return getattr(type(module), name)(module, **arguments, transformer_options=given)


def _find_patches(arguments: dict[str, Any]) -> BlockPatches | None:
    return find_patches(arguments.get("transformer_options") or {}, SAMPLER_OPTIONS)


def _step(options: dict[str, Any]) -> tuple[int, int]:
    """The step's index and the number of steps, from the sampler's options."""
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
