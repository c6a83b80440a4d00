"""Which lists of blocks can be scanned and how each weight is split: proposed from the structure, and from one run."""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from comfy_tpu.bridge import build_skeleton, weight_shapes
from comfy_tpu.compiler.stacking import LayerStack, block_difference
from comfy_tpu.parallel.rules import Rule, RuleKind
from comfy_tpu.porting.layer_names import is_column, is_row
from comfy_tpu.porting.scaffold.pipelines import Source

_MODULATION = re.compile(r"norm[^.]*\.(linear|linear_1)$|(^|\.)(adaLN_modulation|modulation)(\.\d+)?(\.lin(ear)?)?$")
_GATHER_MIN = 64 * 1024


@dataclasses.dataclass(frozen=True)
class Proposal:
    stacks: tuple[LayerStack, ...]
    rules: tuple[Rule, ...]
    """Every weight matches exactly one."""
    nbytes: Mapping[str, int]
    """What each rule divides or keeps, by its pattern, at the published size in bfloat16."""
    heads: str | None
    """The key of the configuration that counts them."""
    left_out: tuple[str, ...]
    """Lists of blocks that are not scanned, and why."""


@dataclasses.dataclass
class _Seen:
    """What one forward showed."""

    calls: dict[str, list[tuple[dict[str, Any], list[Any]]]] = dataclasses.field(default_factory=dict)
    """Of every list of blocks: arguments and outputs, call by call."""
    order: dict[str, list[int]] = dataclasses.field(default_factory=dict)


def propose(source: Source, transformer: torch.nn.Module, run: Callable[[], object]) -> Proposal:
    """`run`: calls the small transformer as the pipeline does."""
    seen = _watch_blocks(transformer, run)
    config = source.full_config("transformer")
    full = build_skeleton(lambda: source.parts["transformer"](**config))
    stacks, left_out = _stacks(transformer, full, seen)
    weights = {_starred(name, stacks): weight for name, weight in weight_shapes(full).items()}
    hidden = _hidden(config)
    kinds = {name: _kind(name, weight, weights, stacks, hidden) for name, weight in weights.items()}
    patterns = merged(kinds)
    sizes: dict[str, int] = collections.Counter()
    for name, weight in weight_shapes(full).items():
        pattern = next(rule.pattern for rule in patterns if fnmatch.fnmatchcase(_starred(name, stacks), rule.pattern))
        sizes[pattern] += math.prod(weight.shape) * torch.bfloat16.itemsize
    heads = next((key for key in ("num_attention_heads", "num_heads", "n_heads") if key in config), None)
    return Proposal(stacks, patterns, sizes, heads, left_out)


def _watch_blocks(transformer: torch.nn.Module, run: Callable[[], object]) -> _Seen:
    seen = _Seen()
    handles = []
    for path, blocks in transformer.named_modules():
        if isinstance(blocks, torch.nn.ModuleList):
            for index, block in enumerate(blocks):
                handles.append(block.register_forward_hook(_noting(seen, path, index), with_kwargs=True))
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _noting(seen: _Seen, path: str, index: int) -> Any:
    def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        names = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        outputs = list(output) if isinstance(output, (tuple, list)) else [output]
        seen.calls.setdefault(path, []).append((dict(names), outputs))
        seen.order.setdefault(path, []).append(index)

    return hook


def _stacks(
    small: torch.nn.Module, full: torch.nn.Module, seen: _Seen
) -> tuple[tuple[LayerStack, ...], tuple[str, ...]]:
    found: list[LayerStack] = []
    left_out: list[str] = []
    for path, calls in seen.calls.items():
        blocks = full.get_submodule(path)
        assert isinstance(blocks, torch.nn.ModuleList)
        if (
            len(blocks) < 2
            or len({type(block) for block in blocks}) > 1
            or any(path.startswith(f"{s.path}.") for s in found)
        ):
            continue
        difference = next(
            (text for block in blocks if (text := block_difference(blocks[0], block, LayerStack.varying))), None
        )
        if difference is not None:
            left_out.append(f"{path}: its blocks differ in {difference}")
            continue
        if seen.order[path] != list(range(len(seen.order[path]))):
            left_out.append(f"{path}: its blocks are not called once each, in their order")
            continue
        carry = _carry(calls)
        if carry is None:
            left_out.append(f"{path}: what a block answers is not what the next one is given")
            continue
        found.append(LayerStack(path, carry=carry))
    return tuple(found), tuple(left_out)


def _carry(calls: Sequence[tuple[dict[str, Any], list[Any]]]) -> tuple[str, ...] | None:
    """The arguments of the next block that are this one's outputs, in their order: by identity, nothing is guessed."""
    if len(calls) < 2:
        return None
    (_, outputs), (following, _) = calls[0], calls[1]
    names = []
    for output in outputs:
        name = next((name for name, value in following.items() if value is output), None)
        if name is None:
            return None
        names.append(name)
    return tuple(names)


def _starred(name: str, stacks: Sequence[LayerStack]) -> str:
    for stack in stacks:
        if name.startswith(f"{stack.path}."):
            return f"{stack.path}.*.{name[len(stack.path) + 1 :].partition('.')[2]}"
    return name


def _hidden(config: Mapping[str, Any]) -> int | None:
    heads = config.get("num_attention_heads") or config.get("num_heads")
    size = config.get("attention_head_dim") or config.get("head_dim")
    return heads * size if isinstance(heads, int) and isinstance(size, int) else None


def _kind(
    name: str,
    weight: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    stacks: Sequence[LayerStack],
    hidden: int | None,
) -> RuleKind:
    owner, _, leaf = name.rpartition(".")
    large = weight.ndim >= 2 and math.prod(weight.shape) * torch.bfloat16.itemsize >= _GATHER_MIN
    if not any(name.startswith(f"{stack.path}.") for stack in stacks):
        return "gather" if large else "replicate"
    attention = is_row(owner) or is_column(owner)
    if _MODULATION.search(owner) and leaf in ("weight", "bias"):
        return "column"  # one row a sample: the answer is cheap to gather, the weight is not
    if attention and _has_partner(owner, weights):
        if is_column(owner) and leaf in ("weight", "bias"):
            return "column"
        if is_row(owner) and leaf == "weight" and weight.ndim == 2:
            return "row"
        return "replicate"
    is_norm = re.search(r"norm_(added_)?[qk]$|[qk]_norm$", owner) is not None
    if is_norm and hidden is not None and tuple(weight.shape) == (hidden,):
        return "column"  # over all heads at once, so it follows the columns
    return "gather" if large else "replicate"


def _has_partner(owner: str, weights: Mapping[str, torch.Tensor]) -> bool:
    """A column without a row behind it would be gathered again, and a row without a column before it cut first."""
    around = {owner.rsplit(".", depth)[0] for depth in (1, 2, 3) if owner.count(".") >= depth}
    is_partner = is_row if is_column(owner) else is_column
    others = {name.rpartition(".")[0] for name in weights}
    return any(is_partner(other) and any(other.startswith(f"{prefix}.") for prefix in around) for other in others)


def merged(kinds: Mapping[str, RuleKind]) -> tuple[Rule, ...]:
    """As few patterns as say the same: siblings of one kind together, as long as each weight matches one alone."""
    patterns: dict[str, RuleKind] = dict(kinds)
    for merge in (_same_owner, _same_letter, _same_number):
        for pattern, members in merge(patterns).items():
            if len(members) > 1 and _holds(pattern, members, patterns, kinds):
                kind = patterns[members[0]]
                position = list(patterns).index(members[0])
                items = [(key, value) for key, value in patterns.items() if key not in members]
                items.insert(position, (pattern, kind))
                patterns = dict(items)
    return tuple(Rule(kind, pattern) for pattern, kind in patterns.items())


def _holds(
    pattern: str, members: Sequence[str], patterns: Mapping[str, RuleKind], kinds: Mapping[str, RuleKind]
) -> bool:
    if len({patterns[member] for member in members}) > 1:
        return False
    covered = {name for member in members for name in kinds if fnmatch.fnmatchcase(name, member)}
    return {name for name in kinds if fnmatch.fnmatchcase(name, pattern)} == covered


def _groups(patterns: Iterable[str], key: Callable[[str], str | None]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for pattern in patterns:
        group = key(pattern)
        if group is not None:
            found.setdefault(group, []).append(pattern)
    return found


def _same_owner(patterns: Mapping[str, RuleKind]) -> dict[str, list[str]]:
    return _groups(patterns, lambda name: f"{name.rpartition('.')[0]}.*")


def _same_letter(patterns: Mapping[str, RuleKind]) -> dict[str, list[str]]:
    return _groups(
        patterns, lambda name: re.sub(r"(to|add|norm)_([qkv])(?=[._])", r"\1_[qkv]", name) if "_" in name else None
    )


def _same_number(patterns: Mapping[str, RuleKind]) -> dict[str, list[str]]:
    return _groups(patterns, lambda name: re.sub(r"(linear_|norm|attn)[12](?=\.)", r"\1[12]", name))
