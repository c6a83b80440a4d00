"""Parses a partitioned program as XLA prints it: collectives, products and kernels, and how often each one runs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from comfy_tpu.config import MESH_AXES, MeshSizes
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.parallel.traffic import KINDS, Kind

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*)$")
_OPERATION = re.compile(r"^(\(.*?\)|\S+) ([a-z][\w\-]*)\(")
_SHAPE = re.compile(r"\b([a-z]+\d*[a-z\d]*)\[([\d,]*)\]")
_CALLS = re.compile(
    r"\b(?:calls|to_apply|body|condition|(?:branch|true|false|called)_computations?)=\{?(%[\w.\-]+(?:, ?%[\w.\-]+)*)"
)
_NAME = re.compile(r"%([\w.\-]+)")
_ELEMENT = re.compile(r"%([\w.\-]+)#(\d+)")
# What may hold a collective: one that the SparseCores run is a call of a computation of theirs.
_CALLERS = ("async-start", "custom-call-start", "fusion")
_DEVICES_MAX = 2**20
_ITEM_BITS = {"pred": 8, "bf16": 16}


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective instruction, on one device."""

    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    """The shape of a gather's result, else of the operand; the first of several."""
    nbytes: int
    group: tuple[int, ...]
    """The partition numbers in the first group."""
    times: int
    """Executions per step."""
    in_loop: bool
    operation: str
    """The instruction's name in the traced program."""

    def axes(self, sizes: MeshSizes) -> tuple[str, ...]:
        """The mesh axes along which the group lies."""
        with _known_form("a collective's devices"):
            places = np.array(np.unravel_index(self.group, (sizes.dp, sizes.sp, sizes.tp)))
        return tuple(axis for axis, row in zip(MESH_AXES, places, strict=True) if len(set(row.tolist())) > 1)


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    result: str
    """Its type."""
    operation: str
    text: str
    computation: str
    is_root: bool

    @property
    def operand_names(self) -> tuple[str, ...]:
        _, _, rest = self.text.partition(f" {self.operation}(")
        return tuple(_NAME.findall(rest[: rest.find(")")]))

    @property
    def source_name(self) -> str:
        """The instruction's name in the traced program."""
        return _metadata(self.text)


class Module:
    def __init__(self, text: str) -> None:
        self._instructions: dict[str, list[Instruction]] = defaultdict(list)
        self._by_name: dict[tuple[str, str], Instruction] = {}
        self._entry = ""
        self._read(text)

    def _read(self, text: str) -> None:
        computation, pending = "", ""

        def finish() -> None:
            match = _INSTRUCTION.match(pending)
            if match and (operation := _OPERATION.match(match[3])):
                text = self._expand_elements(computation, match[3])
                self._append(Instruction(match[2], operation[1], operation[2], text, computation, bool(match[1])))

        for line in text.splitlines():
            if header := _COMPUTATION.match(line):
                finish()
                pending, computation = "", header[2]
                self._entry = computation if header[1] else self._entry
            elif _INSTRUCTION.match(line):
                finish()
                pending = line
            else:
                pending += line  # kernels' configurations run over several lines
        finish()
        if not self._entry:
            raise UnsupportedError(
                "the compiler's text has no entry computation; this version of XLA prints another form"
            )

    def _append(self, instruction: Instruction) -> None:
        self._instructions[instruction.computation].append(instruction)
        self._by_name[instruction.computation, instruction.name] = instruction

    def _expand_elements(self, computation: str, text: str) -> str:
        """Restores the get-tuple-element instructions, which XLA prints as `%tuple#3` in their users since jax 0.11."""
        while element := _ELEMENT.search(text):
            name, index = f"{element[1]}.element.{element[2]}", int(element[2])
            if (computation, name) not in self._by_name:
                source = self._by_name.get((computation, element[1]))
                types = _tuple_types(source.result) if source else []
                if index >= len(types):
                    raise UnsupportedError(f"the compiler's text names {element[0]}, which is not in {computation}")
                call = f"{types[index]} get-tuple-element(%{element[1]}), index={index}"
                self._append(Instruction(name, types[index], "get-tuple-element", call, computation, False))
            text = re.sub(rf"{re.escape(element[0])}(?!\d)", f"%{name}", text)
        return text

    @property
    def entry(self) -> str:
        return self._entry

    def computation(self, name: str) -> list[Instruction]:
        """The instructions of a computation, in the order in which they run where the program is scheduled."""
        return self._instructions.get(name, [])

    def operands(self, instruction: Instruction) -> list[Instruction | None]:
        """The instructions that made the operands; None for one that is not in the same computation."""
        return [self._by_name.get((instruction.computation, name)) for name in instruction.operand_names]

    @functools.cached_property
    def times(self) -> dict[str, int]:
        """How often each computation runs in a step."""
        order = self._callers_first()
        times = dict.fromkeys(order, 0) | {self._entry: 1}
        for computation in order:
            for instruction in self.computation(computation):
                called = self.called_computations(instruction)
                trips = self.trip_count(instruction) if called and instruction.operation == "while" else 1
                for name in called:
                    times[name] += times[computation] * trips
        return times

    def _callers_first(self) -> list[str]:
        """The computations that run, each behind all that call it."""
        finished: dict[str, bool] = {}
        order: list[str] = []
        open_: list[str] = [self._entry]
        while open_:
            computation = open_[-1]
            if finished.get(computation):
                open_.pop()
            elif computation in finished:  # all that it calls are in the list
                finished[computation] = True
                order.append(open_.pop())
            else:
                finished[computation] = False
                called = {
                    name
                    for instruction in self.computation(computation)
                    for name in self.called_computations(instruction)
                }
                if circle := sorted(name for name in called if finished.get(name) is False):
                    raise UnsupportedError(f"the compiler's text has a computation that calls itself: {circle[0]}")
                open_ += called
        return order[::-1]

    @functools.cached_property
    def in_loop(self) -> set[str]:
        found: set[str] = set()

        def visit(computation: str) -> None:
            if computation not in found:
                found.add(computation)
                for instruction in self._instructions[computation]:
                    for called in self.called_computations(instruction):
                        visit(called)

        for instruction in self.instructions():
            if instruction.operation == "while":
                for called in self.called_computations(instruction):
                    visit(called)
        return found

    def instructions(self) -> Iterator[Instruction]:
        for computation in list(self._instructions.values()):
            yield from computation

    def collectives(self) -> list[Collective]:
        with _known_form("a collective"):
            return self._collectives()

    def _collectives(self) -> list[Collective]:
        found, chains = [], set()
        for instruction in self.instructions():
            if _is_collective(instruction) and self.times.get(instruction.computation, 0):
                # A collective that runs beside other work is printed once in each of the fusions it accompanies.
                if (chain := collective_chain(instruction)) is not None:
                    if chain in chains:
                        continue
                    chains.add(chain)
                found.append(self._as_collective(instruction))
        return found

    def find_collective(self, instruction: Instruction) -> tuple[Instruction, Collective] | None:
        """The collective that an instruction is, or that the computation that it calls holds; else None."""
        open_, seen = [instruction], set[str]()
        while open_:
            each = open_.pop()
            if _is_collective(each):
                with _known_form("a collective"):
                    return each, self._as_collective(each)
            if each.operation in _CALLERS:
                called = [name for name in self.called_computations(each) if name not in seen]
                seen.update(called)
                open_ += reversed([inner for name in called for inner in self.computation(name)])
        return None

    def _as_collective(self, instruction: Instruction) -> Collective:
        shapes = _collective_shapes(instruction)
        kind = instruction.operation.removesuffix("-start")
        assert kind in KINDS
        return Collective(
            kind=kind,
            dtype=shapes[0][0],
            shape=shapes[0][1],
            nbytes=sum(_nbytes(dtype, shape) for dtype, shape in shapes),
            group=_group(instruction.text),
            times=self.times.get(instruction.computation, 0),
            in_loop=instruction.computation in self.in_loop,
            operation=_metadata(instruction.text),
        )

    def product_flops(self) -> float:
        """Operations of matrix products in a step; convolutions (a patch embedding) are left out."""
        with _known_form("a product"):
            return self._product_flops()

    def _product_flops(self) -> float:
        total = 0.0
        for instruction in self.instructions():
            times = self.times.get(instruction.computation, 0)
            if instruction.operation == "dot" and times:
                left = re.search(r"dot\(%([\w.\-]+)", instruction.text)
                contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.text)
                if left is None or contracted is None:
                    raise UnsupportedError(f"the product {instruction.name} is printed in a form that is not known")
                shape = self._shape_of(instruction.computation, left[1])
                depth = math.prod(shape[int(dim)] for dim in contracted[1].split(",") if dim)
                total += 2.0 * times * depth * math.prod(_shapes(instruction.result)[0][1])
        return total

    def convolution_flops(self) -> float:
        """Operations of convolutions in a step, padding included; strides and dilations are in the sizes."""
        with _known_form("a convolution"):
            return self._convolution_flops()

    def _convolution_flops(self) -> float:
        total = 0.0
        for instruction in self.instructions():
            times = self.times.get(instruction.computation, 0)
            if instruction.operation == "convolution" and times:
                operands = re.search(r"convolution\(%([\w.\-]+), %([\w.\-]+)\)", instruction.text)
                labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.text)
                if operands is None or labels is None:
                    raise UnsupportedError(f"the convolution {instruction.name} is printed in a form that is not known")
                kernel = self._shape_of(instruction.computation, operands[2])
                # A kernel's inputs are those of one group already.
                taps = math.prod(kernel) // kernel[labels[1].index("o")]
                total += 2.0 * times * taps * math.prod(_shapes(instruction.result)[0][1])
        return total

    def kernel_flops(self) -> float:
        """Operations of Pallas kernels in a step, by the kernels' own cost estimates."""
        total = 0.0
        for instruction in self.instructions():
            if instruction.operation == "custom-call" and (times := self.times.get(instruction.computation, 0)):
                told = re.search(r'"cost_estimate":\s*\{[^}]*?"flops":\s*"?(\d+)', instruction.text)
                total += times * int(told[1]) if told else 0
        return total

    def kernels(self) -> int:
        """The number of calls of Pallas kernels in the text."""
        return sum(
            instruction.operation == "custom-call" and 'custom_call_target="tpu_custom_call"' in instruction.text
            for instruction in self.instructions()
        )

    def shapes(self) -> set[tuple[int, ...]]:
        return {shape for instruction in self.instructions() for _, shape in _shapes(instruction.result)}

    def _shape_of(self, computation: str, name: str) -> tuple[int, ...]:
        if (instruction := self._by_name.get((computation, name))) is None:
            raise UnsupportedError(f"the compiler's text names {name}, which is not in {computation}")
        return _shapes(instruction.result)[0][1]

    def called_computations(self, instruction: Instruction) -> list[str]:
        names = [name.strip().lstrip("%") for group in _CALLS.findall(instruction.text) for name in group.split(",")]
        return [name for name in names if name in self._instructions]

    def trip_count(self, loop: Instruction) -> int:
        """The number of iterations of a loop: a scan compares a counter that starts at zero with a constant."""
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.text):
            return int(known[1])
        condition = re.search(r"condition=%([\w.\-]+)", loop.text)
        body = self._instructions[condition[1]] if condition else []
        constants = {
            instruction.name: int(value[1])
            for instruction in body
            # Unsigned in loops of libtpu's own, which copy an array in parts.
            if (value := re.match(r"[su]32\[\]\S* constant\((\d+)\)", instruction.text))
        }
        for instruction in body:
            if instruction.operation == "compare" and "direction=LT" in instruction.text:
                operands = re.search(r"compare\(%[\w.\-]+, %([\w.\-]+)\)", instruction.text)
                if operands and operands[1] in constants:
                    return constants[operands[1]]
        raise UnsupportedError(
            f"the loop {loop.name} does not say how often it runs; its collectives cannot be counted"
        )


@contextlib.contextmanager
def _known_form(what: str) -> Iterator[None]:
    """Turns the exceptions of a text that is not as XLA prints it into UnsupportedError."""
    try:
        yield
    except (ArithmeticError, LookupError, ValueError) as error:
        raise UnsupportedError(
            f"the compiler's text has {what} that cannot be counted ({type(error).__name__}: {error}); this version of "
            "XLA prints another form"
        ) from error


def _tuple_types(text: str) -> list[str]:
    """The types of a tuple's elements."""
    types, depth = [""], 0
    for character in re.sub(r"/\*.*?\*/", "", text)[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            types.append("")
        else:
            types[-1] += character
    return [each.strip() for each in types]


def _shapes(text: str) -> list[tuple[str, tuple[int, ...]]]:
    text = re.sub(r"\{[^{}]*\}|/\*.*?\*/", "", text)
    return [(dtype, tuple(int(size) for size in sizes.split(",") if size)) for dtype, sizes in _SHAPE.findall(text)]


def item_bits(dtype: str) -> int:
    return _ITEM_BITS.get(dtype) or int(re.sub(r"^[a-z]+", "", dtype).partition("e")[0].partition("m")[0])


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * item_bits(dtype) // 8


def _is_collective(instruction: Instruction) -> bool:
    return instruction.operation.removesuffix("-start") in KINDS


def _collective_shapes(instruction: Instruction) -> list[tuple[str, tuple[int, ...]]]:
    """Dtypes and shapes of the result. An asynchronous start returns operands and results, then counters."""
    shapes = _shapes(instruction.result)
    if instruction.operation in ("all-gather-start", "all-to-all-start", "collective-permute-start"):
        arrays = [shape for shape in shapes if shape[1]]
        return arrays[len(arrays) // 2 :]
    if instruction.operation == "reduce-scatter":
        raise UnsupportedError(f"{instruction.name}: reduce-scatter is not counted yet; the programs here have none")
    return shapes


def _metadata(text: str) -> str:
    found = re.search(r'op_name="([^"]*)"', text)
    return found[1] if found else ""


def collective_chain(instruction: Instruction) -> tuple[str, str] | None:
    """What the parts of a collective have in common that runs beside several fusions; None for a whole one."""
    chain = re.search(r'frontend_attributes=\{[^}]*chain_id="(\d+)"', instruction.text)
    channel = re.search(r"channel_id=(\d+)", instruction.text)
    return (chain[1], channel[1]) if chain and channel else None


def _group(text: str) -> tuple[int, ...]:
    """The first group. XLA prints groups as lists, as a folded range, or as axes of a mesh of its own."""
    if pairs := re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", text):
        return tuple(sorted({int(pairs[1]), int(pairs[2])}))
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        return tuple(int(number) for number in listed[1].split(","))
    if folded := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        devices = _range(folded[2], folded[3])
        return tuple(devices.reshape(_numbers(folded[1]))[0].tolist())
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^)]*\)?)\))? \{([^}]*)\}", text):
        axes = {name: int(size) for name, size in re.findall(r"'([\w]+)'=(\d+)", mesh[1])}
        named = re.findall(r"'(\w+)'", mesh[3])
        order = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", mesh[2] or "")
        total = str(math.prod(axes.values()))
        devices = _range(order[1], order[2]) if order else _range(total, None)
        first = tuple(slice(None) if name in named else 0 for name in axes)
        return tuple(devices.reshape(tuple(axes.values()))[first].ravel().tolist())
    raise UnsupportedError(f"XLA names the devices of a collective in a form that is not known: {text[:200]}")


def _range(shape: str, order: str | None) -> np.ndarray:
    numbers = _numbers(shape)
    if math.prod(numbers) > _DEVICES_MAX:
        raise ValueError(f"{math.prod(numbers)} devices")
    devices = np.arange(math.prod(numbers)).reshape(numbers)
    return devices.transpose(_numbers(order)) if order else devices


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def stablehlo_shapes(text: str) -> set[tuple[int, ...]]:
    """The shapes of all array types in a program before it is compiled."""
    found = set(re.findall(r"tensor<((?:\d+x)+)\w+>", text))
    return {tuple(int(size) for size in shape.split("x")[:-1]) for shape in found}


def describe(shape: tuple[int, ...], dtype: str) -> str:
    return f"{dtype}{json.dumps(list(shape)).replace(' ', '')}"
