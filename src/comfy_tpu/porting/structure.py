"""The structure of a model at its full size, without weights: lists of blocks to scan, weights to shard."""

from __future__ import annotations

import ast
import collections
import dataclasses
import fnmatch
import inspect
import math
import re
from collections.abc import Sequence

import torch

from comfy_tpu.bridge import weight_shapes
from comfy_tpu.compiler.stacking import LayerStack, block_difference
from comfy_tpu.config import ShardingConfig
from comfy_tpu.families.registry import load_families
from comfy_tpu.parallel.rules import Rule, column, row
from comfy_tpu.porting.traps import Finding, find_trap

BLOCKS_MIN = 4
"""Shorter lists are not worth a scan."""

_COLUMN_LAYERS = (
    *("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "q_proj", "k_proj", "v_proj"),
    *("to_qkv", "to_kv", "qkv", "net.0.proj", "fc1", "gate_proj", "up_proj", "w1", "w3", "linear_in", "proj_mlp"),
    *("linear_1", "linear_2"),  # of a gated feed-forward, which ends in out_projection
)
"""Usual names of linear layers whose outputs tensor parallelism splits."""
_ROW_LAYERS = (
    *("to_out.0", "to_out", "to_add_out", "o_proj", "net.2", "fc2", "down_proj", "w2", "linear_out", "out_projection"),
)
"""Usual names of linear layers whose inputs it splits."""
CONVENTIONAL_RULES = (
    *(column(f"*.{name}.weight") for name in _COLUMN_LAYERS),
    *(row(f"*.{name}.weight") for name in _ROW_LAYERS),
)
"""Rules by the usual names of layers, which every family shards in the same way."""


def is_column(layer: str) -> bool:
    """`layer`: the path of a module."""
    return f".{layer}".endswith(tuple(f".{name}" for name in _COLUMN_LAYERS))


def is_row(layer: str) -> bool:
    return f".{layer}".endswith(tuple(f".{name}" for name in _ROW_LAYERS))


def find_structure_traps(model: torch.nn.Module, place: tuple[str, int]) -> list[Finding]:
    """`place`: the file and line of the model's class."""
    return [*_find_uneven_blocks(model), *_find_unknown_weights(model, place)]


def _find_uneven_blocks(model: torch.nn.Module) -> list[Finding]:
    """Findings for lists in which most blocks are equal. Where all differ, as in a decoder, no scan was meant."""
    found = []
    for path, blocks in model.named_modules():
        if not isinstance(blocks, torch.nn.ModuleList) or len(blocks) < BLOCKS_MIN:
            continue
        if len({type(block) for block in blocks}) > 1:  # a chain of different layers, as a feed-forward is
            continue
        variants: list[list[int]] = []
        for index, block in enumerate(blocks):
            for variant in variants:
                if block_difference(blocks[variant[0]], block, LayerStack.varying) is None:
                    variant.append(index)
                    break
            else:
                variants.append([index])
        common = max(variants, key=len)
        if len(variants) > 1 and 2 * len(common) >= len(blocks):
            odd = next(index for index in range(len(blocks)) if index not in common)
            difference = block_difference(blocks[common[0]], blocks[odd], LayerStack.varying)
            owner, _, name = path.rpartition(".")
            reason = (
                f"{path}[{odd}] differs from {path}[{common[0]}] in {difference}, so the {len(blocks)} blocks cannot "
                "run as one scanned layer: tracing and compiling take as many times longer"
            )
            found.append(find_trap("uneven-blocks", _assignment(model.get_submodule(owner), name), reason))
    return found


def _assignment(owner: torch.nn.Module, attribute: str) -> tuple[str, int] | None:
    """File and line of the assignment of a module's attribute."""
    for cls in type(owner).__mro__:
        try:
            lines, first = inspect.getsourcelines(cls)
            file = inspect.getsourcefile(cls) or ""
        except (OSError, TypeError):
            continue
        tree = ast.parse(inspect.cleandoc("\n" + "".join(lines)) if lines[0][:1].isspace() else "".join(lines))
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and any(
                isinstance(target, ast.Attribute) and target.attr == attribute for target in node.targets
            ):
                return file, first + node.lineno - 1
    return None


def family_rules(name: str) -> list[Sequence[Rule]]:
    """The sharding rules of every family with a component of this class."""
    components = {id(each): each for family in load_families() for each in family.components if name in each.classes}
    return [component.rules for component in components.values()]


def _find_unknown_weights(model: torch.nn.Module, place: tuple[str, int]) -> list[Finding]:
    """The finding for large weights without a rule: of the families, or of the usual names where no family has it."""
    choices = family_rules(type(model).__name__) or [CONVENTIONAL_RULES]
    sizes = min((_unmatched_weights(model, rules) for rules in choices), key=collections.Counter.total)
    if not sizes:
        return []
    largest = [name for name, _ in sizes.most_common(3)]
    reason = (
        f"no sharding rule knows {', '.join(largest)}{f' and {len(sizes) - 3} more' if len(sizes) > 3 else ''}: "
        f"{sizes.total() / 2**30:.2f} GiB in bfloat16 that every device would hold"
    )
    fix = "write rules in the family: " + ", ".join(f'gather("{name}")' for name in largest)
    return [dataclasses.replace(find_trap("no-sharding-rule", place, reason, fix), code="")]


def _unmatched_weights(model: torch.nn.Module, rules: Sequence[Rule]) -> collections.Counter[str]:
    """Bytes in bfloat16 by name, with `*` for the numbers of layers."""
    smallest = ShardingConfig().gather_min_bytes
    sizes: collections.Counter[str] = collections.Counter()
    for name, weight in weight_shapes(model).items():
        size = math.prod(weight.shape) * torch.bfloat16.itemsize
        matched = any(fnmatch.fnmatchcase(f".{name}", f"*{rule.pattern}") for rule in rules)
        if weight.ndim == 2 and size >= smallest and not matched:
            sizes[re.sub(r"\.\d+\.", ".*.", name)] += size
    return sizes
