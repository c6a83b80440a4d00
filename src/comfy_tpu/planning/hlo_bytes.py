"""Bytes of device memory that an instruction of a compiled program reads and writes.

Arrays that the TPU compiler keeps in VMEM, and prefetches by transfers of their own, are free here; padding to the
tiles of a layout counts. A fusion that slices an operand (one layer of the stacked weights) reads the slice.
"""

from __future__ import annotations

import math
import re

from comfy_tpu.planning.hlo import Instruction, Module, item_bits

_ARRAY = re.compile(r"\b([a-z]+\d*[a-z\d]*)\[([\d,]*)\](?:\{([\d,]*)(?::([^{}]*))?\})?")
_TILE = re.compile(r"T\(([\d,*]+)\)")
_SLICES = ("dynamic-slice", "slice")
_RENAMES = ("bitcast", "reshape", "convert", "copy")


def count_bytes(module: Module, instruction: Instruction) -> int:
    """Bytes of device memory that one execution reads and writes."""
    if instruction.operation in ("dynamic-update-slice", *_SLICES):
        return _count_slice(module, instruction)
    called = module.called_computations(instruction) if instruction.operation == "fusion" else []
    body = module.computation(called[0]) if called else []
    total = _written_bytes(instruction, body)
    for number, operand in enumerate(module.operands(instruction)):
        if operand is not None:
            total += _read_bytes(module, operand.result, number, body)
    if told := re.search(r'"bytes_accessed":\s*"?(\d+)', instruction.text):
        # A kernel's own estimate: it reads keys and values once for every tile of queries.
        total = max(total, int(told[1]))
    return total


def _count_slice(module: Module, instruction: Instruction) -> int:
    """A part of the first operand is read, or written in place; the rest of it is not touched."""
    operands = module.operands(instruction)
    is_update = instruction.operation == "dynamic-update-slice"
    part = operands[1] if is_update else instruction
    if part is None or operands[0] is None:
        return array_bytes(instruction.result)
    moved = sum(_padded_bytes(*found) for found in _ARRAY.findall(part.result))
    return array_bytes(part.result) + (moved if array_bytes(operands[0].result) else 0)


def array_bytes(type_text: str) -> int:
    """Bytes in device memory of all arrays of a type as the compiler prints it, padded to tiles."""
    return sum(_padded_bytes(*found) for found in _ARRAY.findall(type_text) if "S(" not in found[3])


def moved_bytes(done: Instruction) -> int:
    """Bytes that an asynchronous copy moves, by the instruction that awaits it; wherever they end up."""
    return sum(_padded_bytes(*found) for found in _ARRAY.findall(done.result))


def _padded_bytes(dtype: str, shape: str, order: str, layout: str) -> int:
    sizes = [int(size) for size in shape.split(",") if size]
    if dtype in ("token", "opaque"):
        return 0
    if order:
        sizes = [sizes[int(axis)] for axis in reversed(order.split(","))]
    tile = _TILE.search(layout)
    sides = [int(side) for side in tile[1].split(",") if side.isdigit()] if tile else []
    for place, side in enumerate(reversed(sides), 1):
        # A tile of one dimension pads small arrays to a whole one; large arrays lose nothing worth counting.
        if place <= len(sizes) and len(sides) > 1:
            sizes[-place] = -(-sizes[-place] // side) * side
    return math.prod(sizes) * item_bits(dtype) // 8


def _written_bytes(instruction: Instruction, body: list[Instruction]) -> int:
    root = next((item for item in body if item.is_root), None)
    if root is not None and root.operation == "dynamic-update-slice":
        update = root.operand_names[1]
        changed = next((item for item in body if item.name == update), None)
        return array_bytes(changed.result) if changed and "S(" not in instruction.result else 0
    return array_bytes(instruction.result)


def _read_bytes(module: Module, type_text: str, number: int, body: list[Instruction]) -> int:
    whole = array_bytes(type_text)
    parameter = _find_parameter(number, body)
    if not whole or parameter is None:
        return whole
    slices = _slices_of(module, parameter.name, body)
    return whole if slices is None else min(whole, sum(slices))


def _find_parameter(number: int, body: list[Instruction]) -> Instruction | None:
    return next((item for item in body if re.search(rf"\bparameter\({number}\)", item.text)), None)


def _slices_of(module: Module, name: str, body: list[Instruction]) -> list[int] | None:
    """Bytes of the slices that a fusion takes of a parameter; None where something else reads it."""
    found: list[int] = []
    is_used = False
    for item in body:
        operands = item.operand_names
        if name not in operands:
            continue
        is_used = True
        if item.operation in _SLICES and operands[0] == name:
            found.append(array_bytes(item.result))
            continue
        if item.operation == "dynamic-update-slice" and operands[0] == name:
            continue  # in place: nothing of it is read
        inner = None
        if item.operation in _RENAMES:
            inner = _slices_of(module, item.name, body)
        elif item.operation == "fusion":
            inner = _slices_in_fusion(module, name, item)
        if inner is None:
            return None
        found += inner
    return found if is_used else None


def _slices_in_fusion(module: Module, name: str, fusion: Instruction) -> list[int] | None:
    """The same for a fusion inside of a fusion."""
    found: list[int] = []
    for called in module.called_computations(fusion):
        body = module.computation(called)
        for number, operand in enumerate(fusion.operand_names):
            if operand == name:
                parameter = _find_parameter(number, body)
                slices = _slices_of(module, parameter.name, body) if parameter else None
                if slices is None:
                    return None
                found += slices
    return found
