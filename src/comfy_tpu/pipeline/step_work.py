"""Counts the cost of a denoising step: matrices from the skeleton and its sharding rules, and the rows that they
multiply from the traced step. Nothing is compiled or run, and no weight is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from comfy_tpu.compiler.component import Component
from comfy_tpu.compiler.stacking import INDEX
from comfy_tpu.compiler.stored import ProgramStore
from comfy_tpu.config import GenerationSettings, MeshSizes
from comfy_tpu.families.card import Config
from comfy_tpu.families.context import (
    call_settings,
    choose_method,
    find_windows,
    needs_first_frame,
    window_settings,
)
from comfy_tpu.families.model_family import ModelFamily
from comfy_tpu.parallel.mesh import abstract_placement
from comfy_tpu.parallel.rules import RuleKind
from comfy_tpu.parallel.workload import Matrix, Rows, Stack, Workload
from comfy_tpu.pipeline.step import (
    StepPrograms,
    abstract_embeddings,
    abstract_state,
    batch_rows,
    count_branches,
    is_guided,
    latent_shape,
    split_prepared,
    step_shape,
)

_SAMPLE_ROWS_MAX = 4
"""Rows per sample of a module that reads no tokens, at most: one for each timestep."""


@dataclasses.dataclass(frozen=True)
class _Call:
    """A module that a traced step calls."""

    order: int
    rows: int
    """Rows per sample that a linear layer multiplies; positions of a convolution."""
    outputs: int
    """The number of output features."""

    @property
    def is_of_samples(self) -> bool:
        """Whether the module reads a row of each sample, or of each of a few timesteps of it, and no tokens."""
        return self.rows <= _SAMPLE_ROWS_MAX


@dataclasses.dataclass(frozen=True)
class _Weight:
    """A weight of the skeleton, of one layer where blocks are stacked."""

    name: str
    stack: str
    """The path of the weight's list of blocks; empty outside of blocks."""
    layers: int
    kind: RuleKind
    shape: tuple[int, ...]
    itemsize: int

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) > 1 and self.kind != "replicate"

    @property
    def nbytes(self) -> int:
        return self.layers * math.prod(self.shape) * self.itemsize


@dataclasses.dataclass(frozen=True)
class _Model:
    """A family with a configuration, as a cache key."""

    name: str
    predict: Any
    config: str
    latent_channels: int
    family: ModelFamily = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class _Structure:
    """The facts of a model that do not depend on the size of a request."""

    stacks: tuple[Stack, ...]
    outer: tuple[Matrix, ...]
    small_bytes: int
    heads: int
    hidden: int
    output_features: int
    has_keys: bool
    other_tokens: int
    """Tokens that go through the blocks besides those of the latents: given images."""
    other_text_tokens: int
    """Other tokens that go through the blocks with the prompt: words in quotes, a first frame."""

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> _Structure:
        """The structure that `dataclasses.asdict` wrote as JSON."""
        stacks = (Stack(**{**stack, "matrices": _read_matrices(stack["matrices"])}) for stack in written["stacks"])
        return cls(**{**written, "stacks": tuple(stacks), "outer": _read_matrices(written["outer"])})


def _read_matrices(written: Iterable[Mapping[str, Any]]) -> tuple[Matrix, ...]:
    return tuple(Matrix(**{**matrix, "shape": tuple(matrix["shape"])}) for matrix in written)


def count_step(
    family: ModelFamily,
    config: Config,
    settings: GenerationSettings,
    latent_channels: int,
    store: ProgramStore | None = None,
    *,
    windows: int = 1,
) -> Workload:
    """The workload of one step of the family's transformer with this configuration. Traces each model once, and with a
    `store` once for all processes. `windows`: those in a call, where the video is longer than the model's own length.
    """
    card = family.card
    method = choose_method(card, settings, begins_with_image=needs_first_frame(card))
    context = find_windows(card, settings, method)
    if context is not None:
        work = count_step(family, config, call_settings(card, settings, windows), latent_channels, store)
        whole = math.prod(latent_shape(family, latent_channels, settings)) * 4
        calls = -(-context.count() // windows)
        return dataclasses.replace(work, video_latent_bytes=whole, calls=calls)
    if method == "continue":
        work = count_step(family, config, window_settings(settings), latent_channels, store)
        return dataclasses.replace(work, calls=card.segment_count(settings))
    text = json.dumps(dict(config), sort_keys=True, default=str)
    found = _find_structure(_Model(family.name, family.denoiser.predict, text, latent_channels, family), store)
    latents = step_shape(family, latent_channels, settings, family.text.embedding_shapes(config, settings))
    return Workload(
        batch=batch_rows(family, settings),
        tokens=_count_tokens(family, latents, settings, found.output_features) + found.other_tokens,
        text_tokens=settings.max_sequence_length + found.other_text_tokens,
        text="keys" if found.has_keys else "joint",
        heads=found.heads,
        head_dim=found.hidden // found.heads,
        ffn=max(_ffn(stack, found.hidden) for stack in found.stacks if stack.attends),
        stacks=found.stacks,
        outer=found.outer,
        small_bytes=found.small_bytes,
        output_features=found.output_features,
        latent_bytes=math.prod(latents) * 4,
        models=family.card.transformer_count,
    )


def _count_tokens(
    family: ModelFamily, latents: tuple[int, ...], settings: GenerationSettings, output_features: int
) -> int:
    """Tokens of a video, without those of its sound."""
    values = latents[1] * family.card.latent_frames(settings) * math.prod(latents[3:])
    return values // output_features


@functools.lru_cache(maxsize=64)
def _find_structure(model: _Model, store: ProgramStore | None) -> _Structure:
    if store is None:
        return _structure(model)
    denoiser, text = model.family.denoiser, model.family.text
    decided_by = (model.name, denoiser, text.embedding_shapes, model.config, model.latent_channels)
    written = store.fact("workload", decided_by, lambda: dataclasses.asdict(_structure(model)), name=model.name)
    return _Structure.read(written)


def _structure(model: _Model) -> _Structure:
    family, config = model.family, json.loads(model.config)
    settings = family.card.defaults
    placement = abstract_placement(MeshSizes(), platform="cpu", chip="")
    component = Component(family.transformer, config, placement, dtype=torch.bfloat16)
    latents = step_shape(family, model.latent_channels, settings, family.text.embedding_shapes(config, settings))
    calls, used, has_keys = _trace(family, config, settings, component, latents)
    weights = list(_weights(component))
    # A list of blocks that no device divides, or that a step does not run, is not the transformer's: it refines the
    # text, and counts as the rest.
    divided = dict.fromkeys(
        each.stack for each in weights if each.stack and each.kind in ("column", "row") and each.name in used
    )
    last = max(calls.values(), key=lambda call: call.order)
    own_tokens = _count_tokens(family, latents, settings, last.outputs)
    tokens, sound_tokens = max(last.rows, own_tokens), family.card.sound_tokens(settings)
    stacked_rows = {
        path: {
            calls[each.module].rows
            for each in weights
            if each.is_matrix and each.stack == path and each.module in calls and not calls[each.module].is_of_samples
        }
        for path in divided
    }
    text_tokens = settings.max_sequence_length if has_keys else _joint_text_tokens(stacked_rows.values(), tokens)
    sizes: dict[int, Rows] = {tokens + text_tokens: "both", text_tokens: "text", tokens: "tokens"}

    def matrices(stack: str) -> tuple[Matrix, ...]:
        inside = [each for each in weights if each.is_matrix and (each.stack if each.stack in divided else "") == stack]
        return tuple(
            _matrix(each, calls[each.module] if each.name in used else None, sizes, sound_tokens, per_layer=bool(stack))
            for each in inside
        )

    attending = {stack.path for stack in family.transformer.stacks if stack.attends}
    stacks = tuple(
        dataclasses.replace(
            _stack(path, matrices(path), weights, calls, attends=path in attending),
            reads_text=has_keys or bool(stacked_rows[path] - {tokens}),
        )
        for path in divided
    )
    return _Structure(
        stacks=stacks,
        outer=matrices(""),
        small_bytes=sum(each.nbytes for each in weights if not each.is_matrix),
        heads=component.heads,
        hidden=next(matrix.shape[1] for stack in stacks for matrix in _columns(stack)),
        output_features=last.outputs,
        has_keys=has_keys,
        other_tokens=tokens - own_tokens,
        other_text_tokens=text_tokens - settings.max_sequence_length,
    )


def _trace(
    family: ModelFamily,
    config: Config,
    settings: GenerationSettings,
    component: Component,
    latents: tuple[int, ...],
) -> tuple[dict[str, _Call], frozenset[str], bool]:
    """The modules that a step calls, the weights that its outputs depend on, and whether keys of the prompt are
    prepared; if not, the text goes through the blocks."""
    programs = StepPrograms(family.denoiser, component.program)
    weights = component.abstract_weights()
    embeddings = abstract_embeddings(family, config, settings)
    keys, inputs = split_prepared(programs.prepare(embeddings).shapes(weights, **embeddings))
    branches = count_branches(family, settings, guided=is_guided(family, settings))
    with _record_calls(component.module, batch_rows(family, settings)) as calls:
        used = programs.compute().used_weights(
            {**weights, **keys}, **abstract_state(latents), prepared=inputs, branches=branches
        )
    return calls, used, bool(keys)


@contextlib.contextmanager
def _record_calls(skeleton: torch.nn.Module, batch: int) -> Iterator[dict[str, _Call]]:
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
        yield _Weight(slot.name, path if found else "", layers, kind, tuple(shape), slot.dtype.itemsize)


def _columns(stack: Stack) -> list[Matrix]:
    """The matrices that widen the tokens of a block."""
    return [matrix for matrix in stack.matrices if matrix.kind == "column" and matrix.rows != "samples"]


def _ffn(stack: Stack, hidden: int) -> int:
    """The width of the widest activation besides queries, keys and values; 0 if a block has none."""
    columns = _columns(stack)
    widest = max(matrix.shape[0] for matrix in columns)
    return widest - 3 * hidden if len(columns) == 1 else widest


def _stack(
    path: str,
    matrices: tuple[Matrix, ...],
    weights: Collection[_Weight],
    calls: Mapping[str, _Call],
    *,
    attends: bool,
) -> Stack:
    inside = [each for each in weights if each.stack == path]
    split = [each for each in inside if len(each.shape) == 1 and each.kind == "column" and each.module in calls]
    linear = {each.module for each in inside if each.is_matrix}
    norms = len([each for each in split if each.module not in linear])
    return Stack(inside[0].layers, matrices, norms=norms, attends=attends)


def _matrix(
    weight: _Weight, call: _Call | None, sizes: Mapping[int, Rows], sound_tokens: int, *, per_layer: bool
) -> Matrix:
    """The matrix of a weight. `call` None: a step does not use it. The tokens of a sound count as rows of a sample: 126
    beside 6,144 of the video, of a model of half the width."""
    return Matrix(
        weight.kind,
        weight.shape,
        itemsize=weight.itemsize,
        count=1 if per_layer else weight.layers,
        used=call is not None,
        rows=sizes.get(call.rows, "samples") if call is not None else "tokens",
        sample_rows=call.rows if call is not None and (call.is_of_samples or call.rows == sound_tokens) else 1,
    )


def _joint_text_tokens(stacks: Iterable[Collection[int]], tokens: int) -> int:
    """The number of text tokens, from the rows that the matrices of each stack multiply: video and text, or both at
    once; 0 if no stack has a text."""
    for rows in stacks:
        if others := sorted(set(rows) - {tokens}):
            return others[0] if tokens in rows else others[0] - tokens
    return 0
