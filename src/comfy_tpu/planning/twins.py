"""Finds the schedule of each instruction: libtpu compiles instructions that are alike once, under the name of one."""

from __future__ import annotations

import re
from collections.abc import Iterable

from comfy_tpu.planning.hlo import Instruction, Module

_NOT_CODE = re.compile(r", (?:metadata|backend_config|frontend_attributes|sharding)=.*$", re.DOTALL)
_NAMES = re.compile(r"%[\w.\-]+")
_NUMBERS = re.compile(r"channel_id=\d+|/\*index=\d+\*/")


def find_twins(module: Module, programs: Iterable[str]) -> dict[str, str]:
    """For each instruction, the program that has its schedule: its own, or that of an instruction that is alike."""
    known = set(programs)
    called = {
        name
        for instruction in module.instructions()
        if instruction.operation == "fusion"
        for name in module.called_computations(instruction)
    }
    # Instructions inside of fusions have no program of their own.
    candidates = [item for item in module.instructions() if item.computation not in called]
    signatures: dict[str, str] = {}
    found: dict[str, str] = {}
    for instruction in candidates:
        if instruction.name in known:
            found[instruction.name] = instruction.name
            signatures.setdefault(_signature(module, instruction), instruction.name)
    for instruction in candidates:
        if instruction.name not in known and (twin := signatures.get(_signature(module, instruction))) is not None:
            found[instruction.name] = twin
    return found


def _signature(module: Module, instruction: Instruction) -> str:
    """What two instructions have in common that are compiled once: types with layouts, attributes, and code."""
    operands = (operand.result if operand else "?" for operand in module.operands(instruction))
    inside = (_code(module, called) for called in module.called_computations(instruction))
    return "\n".join((_strip(instruction), *operands, *inside))


def _code(module: Module, computation: str) -> str:
    lines = []
    numbers: dict[str, int] = {}
    for instruction in module.computation(computation):
        numbers[instruction.name] = len(numbers)
        uses = [str(numbers.get(name, "?")) for name in instruction.operand_names]
        lines.append(f"{_strip(instruction)} {' '.join(uses)}")
        lines += [_code(module, called) for called in module.called_computations(instruction)]
    return "\n".join(lines)


def _strip(instruction: Instruction) -> str:
    return _NUMBERS.sub("", _NAMES.sub("%", _NOT_CODE.sub("", instruction.text)))
