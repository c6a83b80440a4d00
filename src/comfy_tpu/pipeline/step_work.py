"""The cost of a denoising step, counted: matrices from the skeleton and its sharding rules, and the rows that they
multiply from the traced step. Nothing is compiled or run, and no weight is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from comfy_tpu.compiler.component import Component
from comfy_tpu.compiler.stacking import INDEX
from comfy_tpu.config import GenerationSettings, MeshSizes
from comfy_tpu.families.card import Config
from comfy_tpu.families.model_family import ModelFamily
from comfy_tpu.parallel.mesh import abstract_placement
from comfy_tpu.parallel.rules import RuleKind
from comfy_tpu.parallel.workload import Matrix, Rows, Stack, Workload
from comfy_tpu.pipeline.step import (
    StepPrograms,
    abstract_embeddings,
    abstract_state,
    batch_rows,
    is_guided,
    latent_shape,
    split_prepared,
)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A module that a traced step calls."""

    order: int
    rows: int
    """Rows per sample that a linear layer multiplies; positions of a convolution."""
    outputs: int
    """Features of its output."""


@dataclasses.dataclass(frozen=True)
class _Weight:
    """A weight of the skeleton, of one layer where blocks are stacked."""

    module: str
    stack: str
    """The path of its list of blocks; empty outside of them."""
    layers: int
    kind: RuleKind
    shape: tuple[int, ...]
    itemsize: int

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) > 1 and self.kind != "replicate"

    @property
    def nbytes(self) -> int:
        return self.layers * math.prod(self.shape) * self.itemsize


def count_step(family: ModelFamily, config: Config, settings: GenerationSettings, latent_channels: int) -> Workload:
    """The workload of one step of the family's transformer with this configuration."""
    placement = abstract_placement(MeshSizes(), platform="cpu", chip="")
    component = Component(family.transformer, config, placement, dtype=torch.bfloat16)
    batch, latents = batch_rows(family, settings), latent_shape(family, latent_channels, settings)
    calls, has_keys = _trace(family, config, settings, component, batch, latents)
    weights = list(_weights(component))
    # A list of blocks that no device divides is not the transformer's: it refines the text, and counts as the rest.
    divided = {weight.stack for weight in weights if weight.stack and weight.kind in ("column", "row")}
    last = max(calls.values(), key=lambda call: call.order)
    tokens = math.prod(latents[1:]) // last.outputs
    stacked_rows = {calls[each.module].rows for each in weights if each.stack in divided and each.module in calls}
    prompt = family.text.embedding_shapes(config, settings)["text"]
    text_tokens = prompt[0] if has_keys else _joint_text_tokens(stacked_rows, tokens)
    sizes: dict[int, Rows] = {1: "samples", tokens + text_tokens: "both", text_tokens: "text", tokens: "tokens"}

    def matrices(stack: str) -> tuple[Matrix, ...]:
        inside = [each for each in weights if each.is_matrix and (each.stack if each.stack in divided else "") == stack]
        return tuple(_matrix(each, calls, sizes, per_layer=bool(stack)) for each in inside)

    paths = dict.fromkeys(each.stack for each in weights if each.stack in divided)
    stacks = tuple(_stack(path, matrices(path), weights, calls) for path in paths)
    heads = component.heads
    hidden = next(matrix.shape[1] for stack in stacks for matrix in _columns(stack))
    return Workload(
        batch=batch,
        tokens=tokens,
        text_tokens=text_tokens,
        text="keys" if has_keys else "joint",
        heads=heads,
        head_dim=hidden // heads,
        ffn=max(_ffn(stack, hidden) for stack in stacks),
        stacks=stacks,
        outer=matrices(""),
        small_bytes=sum(each.nbytes for each in weights if not each.is_matrix),
        output_features=last.outputs,
        latent_bytes=math.prod(latents) * 4,
        models=family.card.transformer_count,
    )


def _trace(
    family: ModelFamily,
    config: Config,
    settings: GenerationSettings,
    component: Component,
    batch: int,
    latents: tuple[int, ...],
) -> tuple[dict[str, _Call], bool]:
    """The modules that a step calls; and whether keys of the prompt are prepared, or text goes through the blocks."""
    programs = StepPrograms(family.denoiser, component.program)
    weights = component.abstract_weights()
    embeddings = abstract_embeddings(family, config, settings)
    keys, inputs = split_prepared(programs.prepare(embeddings).shapes(weights, **embeddings))
    guided = is_guided(family, settings)
    with _recorded_calls(component.module, batch) as calls:
        programs.compute().shapes({**weights, **keys}, **abstract_state(latents), prepared=inputs, guided=guided)
    return calls, bool(keys)


@contextlib.contextmanager
def _recorded_calls(skeleton: torch.nn.Module, batch: int) -> Iterator[dict[str, _Call]]:
    names = {module: name for name, module in skeleton.named_modules()}
    calls: dict[str, _Call] = {}

    def record(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module not in names or not isinstance(output, torch.Tensor):
            return
        given, made = tuple(args[0].shape) if args else tuple(output.shape), tuple(output.shape)
        if isinstance(module, torch.nn.modules.conv._ConvNd):
            call = _Call(len(calls), math.prod(made[2:]), made[1])
        else:
            call = _Call(len(calls), max(math.prod(given[:-1]) // batch, 1), made[-1])
        calls.setdefault(names[module], call)

    handle = torch.nn.modules.module.register_module_forward_hook(record)
    try:
        yield calls
    finally:
        handle.remove()


def _weights(component: Component) -> Iterator[_Weight]:
    for slot in component.slots:
        path, found, _ = slot.name.partition(f".{INDEX}.")
        layers, shape = (slot.shape[0], slot.shape[1:]) if found else (1, slot.shape)
        kind = component.plan.entries[slot.name].rule.kind
        module = slot.name.rpartition(".")[0]
        yield _Weight(module, path if found else "", layers, kind, tuple(shape), slot.dtype.itemsize)


def _columns(stack: Stack) -> list[Matrix]:
    """The matrices that widen the tokens of a block."""
    return [matrix for matrix in stack.matrices if matrix.kind == "column" and matrix.rows != "samples"]


def _ffn(stack: Stack, hidden: int) -> int:
    """The widest activation besides queries, keys and values, which a block with one such matrix has in it."""
    columns = _columns(stack)
    widest = max(matrix.shape[0] for matrix in columns)
    return widest - 3 * hidden if len(columns) == 1 else widest


def _stack(path: str, matrices: tuple[Matrix, ...], weights: Collection[_Weight], calls: Mapping[str, _Call]) -> Stack:
    inside = [each for each in weights if each.stack == path]
    split = [each for each in inside if len(each.shape) == 1 and each.kind == "column" and each.module in calls]
    linear = {each.module for each in inside if each.is_matrix}
    return Stack(inside[0].layers, matrices, norms=len([each for each in split if each.module not in linear]))


def _matrix(weight: _Weight, calls: Mapping[str, _Call], sizes: Mapping[int, Rows], *, per_layer: bool) -> Matrix:
    call = calls.get(weight.module)
    return Matrix(
        weight.kind,
        weight.shape,
        itemsize=weight.itemsize,
        count=1 if per_layer else weight.layers,
        used=call is not None,
        rows=sizes.get(call.rows, "samples") if call is not None else "tokens",
    )


def _joint_text_tokens(rows: Collection[int], tokens: int) -> int:
    """From the rows that matrices of the blocks multiply: those of the image or video, of the text, or of both."""
    others = sorted(set(rows) - {1, tokens})
    if not others:
        return 0
    return others[0] if tokens in rows else others[0] - tokens
