"""Which lists of blocks can be scanned and how each weight is split: proposed from the structure, and from one run."""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import functools
import inspect
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from comfy_tpu.bridge import build_skeleton, weight_shapes
from comfy_tpu.compiler.stacking import LayerStack, block_difference
from comfy_tpu.parallel.rules import Rule, RuleKind
from comfy_tpu.porting.scaffold.pipelines import Source
from comfy_tpu.porting.structure import is_column, is_row

_MODULATION = re.compile(r"norm[^.]*\.(linear|linear_1)$|(^|\.)(adaLN_modulation|modulation)(\.\d+)?(\.lin(ear)?)?$")
_GATHER_MIN = 64 * 1024


@dataclasses.dataclass(frozen=True)
class Proposal:
    stacks: tuple[LayerStack, ...]
    rules: tuple[Rule, ...]
    """Every weight matches exactly one."""
    nbytes: Mapping[str, int]
    """The bytes that each rule divides or keeps, by its pattern, at the published size in bfloat16."""
    heads: str | None
    """The key of the configuration that counts them."""
    unstacked: tuple[str, ...]
    """Lists of blocks that are not scanned, and why."""


@dataclasses.dataclass(frozen=True)
class _BlockCall:
    index: int
    arguments: Mapping[str, Any]
    outputs: Sequence[Any]


def propose_sharding(source: Source, transformer: torch.nn.Module, inputs: Mapping[str, Any]) -> Proposal:
    """`transformer` is a small one; `inputs`, the arguments that the pipeline gives to it."""
    config = source.full_config("transformer")
    full = build_skeleton(functools.partial(source.parts["transformer"], **config))
    stacks, unstacked = _find_stacks(full, _record_blocks(transformer, inputs))
    sizes: dict[str, int] = collections.Counter()
    weights: dict[str, torch.Tensor] = {}
    for name, weight in weight_shapes(full).items():
        pattern = _star_layers(name, stacks)
        weights[pattern] = weight
        sizes[pattern] += math.prod(weight.shape) * torch.bfloat16.itemsize
    kinds = {name: _choose_kind(name, weight, weights, stacks, config) for name, weight in weights.items()}
    rules = merge_patterns(kinds)
    nbytes = {
        rule.pattern: sum(size for name, size in sizes.items() if fnmatch.fnmatchcase(name, rule.pattern))
        for rule in rules
    }
    heads = next((key for key in ("num_attention_heads", "num_heads", "n_heads") if key in config), None)
    return Proposal(stacks, rules, nbytes, heads, unstacked)


def _record_blocks(transformer: torch.nn.Module, inputs: Mapping[str, Any]) -> dict[str, list[_BlockCall]]:
    """The calls of the blocks of every list in one forward."""
    calls: dict[str, list[_BlockCall]] = {}

    def record(path: str, index: int, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        outputs = output if isinstance(output, (tuple, list)) else [output]
        calls.setdefault(path, []).append(_BlockCall(index, arguments, outputs))

    handles = [
        block.register_forward_hook(functools.partial(record, path, index), with_kwargs=True)
        for path, blocks in transformer.named_modules()
        if isinstance(blocks, torch.nn.ModuleList)
        for index, block in enumerate(blocks)
    ]
    try:
        with torch.no_grad():
            transformer(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _find_stacks(
    full: torch.nn.Module, calls: Mapping[str, Sequence[_BlockCall]]
) -> tuple[tuple[LayerStack, ...], tuple[str, ...]]:
    """Lists that can be scanned, and sentences about the others."""
    stacks: list[LayerStack] = []
    unstacked: list[str] = []
    for path, block_calls in calls.items():
        blocks = full.get_submodule(path)
        assert isinstance(blocks, torch.nn.ModuleList)
        is_uniform = len(blocks) > 1 and len({type(block) for block in blocks}) == 1
        if not is_uniform or any(path.startswith(f"{stack.path}.") for stack in stacks):
            continue
        differences = (block_difference(blocks[0], block, LayerStack.varying) for block in blocks)
        difference = next(filter(None, differences), None)
        carry = _find_carry(block_calls)
        if difference is not None:
            unstacked.append(f"{path}: its blocks differ in {difference}")
        elif [call.index for call in block_calls] != list(range(len(block_calls))):
            unstacked.append(f"{path}: its blocks are not called once each, in their order")
        elif carry is None:
            unstacked.append(f"{path}: what a block answers is not what the next one is given")
        else:
            stacks.append(LayerStack(path, carry=carry))
    return tuple(stacks), tuple(unstacked)


def _find_carry(calls: Sequence[_BlockCall]) -> tuple[str, ...] | None:
    """The arguments of the next block that are this one's outputs, in their order: by identity, nothing is guessed."""
    if len(calls) < 2:
        return None
    arguments = calls[1].arguments.items()
    names = [next((name for name, value in arguments if value is each), None) for each in calls[0].outputs]
    return None if None in names else tuple(name for name in names if name is not None)


def _star_layers(name: str, stacks: Sequence[LayerStack]) -> str:
    """The name with `*` for the number of a layer."""
    for stack in stacks:
        if name.startswith(f"{stack.path}."):
            return f"{stack.path}.*.{name[len(stack.path) + 1 :].partition('.')[2]}"
    return name


def _choose_kind(
    name: str,
    weight: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    stacks: Sequence[LayerStack],
    config: Mapping[str, Any],
) -> RuleKind:
    owner, _, leaf = name.rpartition(".")
    is_large = weight.ndim >= 2 and math.prod(weight.shape) * torch.bfloat16.itemsize >= _GATHER_MIN
    unpaired: RuleKind = "gather" if is_large else "replicate"
    if not any(name.startswith(f"{stack.path}.") for stack in stacks):
        return unpaired
    if _MODULATION.search(owner) and leaf in ("weight", "bias"):
        return "column"  # one row a sample: the answer is cheap to gather, the weight is not
    if (is_row(owner) or is_column(owner)) and _has_partner(owner, weights):
        if is_column(owner) and leaf in ("weight", "bias"):
            return "column"
        return "row" if is_row(owner) and leaf == "weight" and weight.ndim == 2 else "replicate"
    heads = config.get("num_attention_heads") or config.get("num_heads") or 0
    features = config.get("attention_head_dim") or config.get("head_dim") or 0
    if re.search(r"norm_(added_)?[qk]$|[qk]_norm$", owner) and tuple(weight.shape) == (heads * features,):
        return "column"  # over all heads at once, so it follows the columns
    return unpaired


def _has_partner(owner: str, weights: Mapping[str, torch.Tensor]) -> bool:
    """A column without a row behind it would be gathered again, and a row without a column before it cut first."""
    around = tuple(f"{owner.rsplit('.', depth)[0]}." for depth in (1, 2, 3) if owner.count(".") >= depth)
    is_partner = is_row if is_column(owner) else is_column
    return any(is_partner(name.rpartition(".")[0]) and name.startswith(around) for name in weights)


_SHORTENINGS = (
    (r"[^.]+$", "*"),
    (r"(to|add|norm)_[qkv](?=[._])", r"\1_[qkv]"),
    (r"(linear_|norm|attn)[12](?=\.)", r"\1[12]"),
)
"""Parts of a name, and the glob that stands for siblings."""


def merge_patterns(kinds: Mapping[str, RuleKind]) -> tuple[Rule, ...]:
    """Rules with few patterns: siblings of one kind are merged, as long as each weight matches one pattern alone."""
    patterns: dict[str, RuleKind] = dict(kinds)
    for part, glob in _SHORTENINGS:
        siblings: dict[str, list[str]] = {}
        for pattern in patterns:
            siblings.setdefault(re.sub(part, glob, pattern), []).append(pattern)
        for pattern, members in siblings.items():
            is_one_kind = len({patterns[member] for member in members}) == 1
            if len(members) > 1 and is_one_kind and _match(kinds, pattern) == _match(kinds, *members):
                others = members[1:]
                patterns = {
                    pattern if key == members[0] else key: kind for key, kind in patterns.items() if key not in others
                }
    return tuple(Rule(kind, pattern) for pattern, kind in patterns.items())


def _match(names: Mapping[str, Any], *patterns: str) -> set[str]:
    return {name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}
