"""Reading calls of torch's functions and of tensors' methods."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping

from comfy_tpu.porting.values import TRACED, UNKNOWN, Place, Value, computed, known
from comfy_tpu.porting.vocabulary import (
    AS_NUMBERS,
    COMPARING,
    COMPLEX,
    COMPLEX_METHODS,
    DECIDING,
    DESCRIBING_FUNCTIONS,
    DESCRIBING_METHODS,
    MAKING,
    MAKING_LIKE,
    OTHER_DEVICES,
    RANDOM,
    RANDOM_INITIAL,
    RANDOM_METHODS,
    SEVERAL,
    SHAPED_BY_DATA,
    SIZED,
)


class TorchCallReading:
    """The part of reading a function that knows torch."""

    building: bool

    def report(self, trap: str, node: ast.AST, reason: str | None = None) -> None:
        raise NotImplementedError

    def value(self, node: ast.expr | None) -> Value:
        raise NotImplementedError

    def host_written(self, node: ast.AST, value: Value) -> None:
        raise NotImplementedError

    def torch_function(self, node: ast.Call, name: str, arguments: list[Value], keywords: Mapping[str, Value]) -> Value:
        short = name.split(".")[-1]
        values = [*arguments, *keywords.values(), *(value.items for value in arguments if value.items is not None)]
        if name == "_assert":
            if arguments and arguments[0].is_traced:
                self.report("tensor-assert", node)
            return UNKNOWN
        if name == "is_tensor":
            return known(True) if arguments and arguments[0].is_tensor else UNKNOWN
        if f"torch.{name}" in DESCRIBING_FUNCTIONS or short[:1].isupper():
            return UNKNOWN
        if name in RANDOM or (name.startswith("nn.init.") and short in RANDOM_INITIAL):
            self.report("random-in-forward", node)
            return self._made(node, keywords, values)
        if name in MAKING:
            self._check_square(node)
            if name in SIZED and any(value.is_traced for value in arguments):
                self.report("tensor-to-number", node, "the size of a tensor is the value of another, and must be known")
            return self._made(node, keywords, values)
        result = computed(*values)
        if not result.is_tensor and not name.startswith(("nn.functional.", "special.", "linalg.", "fft.")):
            result = UNKNOWN if not name.endswith("_like") else TRACED
        if result.is_traced:
            self._check_data(node, short, arguments, keywords)
            training = keywords.get("training", (*arguments[2:3], UNKNOWN)[0])
            if name == "nn.functional.dropout" and training.truth:
                self.report("random-in-forward", node)
            if short in COMPLEX or name.startswith("fft.") or any(value.is_complex for value in values):
                self.report("complex", node)
            if keywords.get("out", UNKNOWN).place is Place.HOST:
                self.host_written(node, keywords["out"])
            if short in DECIDING:
                return TRACED
            self._check_float64(node, arguments, keywords)
        if short in ("tril", "triu"):
            return dataclasses.replace(result, is_mask=bool(arguments) and arguments[0].is_mask)
        return self._result(short, result, several=short in SEVERAL, has_dim=len(arguments) > 1 or "dim" in keywords)

    def tensor_method(
        self, node: ast.Call, owner: Value, name: str, arguments: list[Value], keywords: Mapping[str, Value]
    ) -> Value:
        if name == "cuda":
            self.report("cuda", node, ".cuda() is called, which fails where there is no NVIDIA GPU")
            return TRACED
        if name in DESCRIBING_METHODS and not (name == "type" and arguments):
            return UNKNOWN
        if name in AS_NUMBERS:
            if owner.is_traced:
                self.report("tensor-to-number", node)
            return UNKNOWN
        if name in RANDOM_METHODS:
            self.report("random-in-forward", node)
        result = computed(owner, *arguments, *keywords.values())
        if owner.place is Place.HOST:
            if name.endswith("_") and result.is_traced:
                self.host_written(node, owner)
            if name in ("to", "type_as"):
                return self._moved(node, owner, arguments, keywords)
            if not result.is_traced:
                return dataclasses.replace(owner, is_mask=name in COMPARING or owner.is_mask)
        if name.endswith("_") and not name.endswith("__") and owner.is_strided:
            self.report("strided-write", node)
        if name in MAKING_LIKE or (name == "expand" and owner.is_mask):
            self._check_square(node)
        # `*shape` is a shape as a rule, and the rule is easier to see than the shape.
        sizes = [value for value, size in zip(arguments, node.args, strict=True) if not isinstance(size, ast.Starred)]
        shaped = ("expand", "repeat", "view", "reshape", "new_zeros", "new_ones", "new_empty")
        if name in shaped and any(value.is_traced for value in sizes):
            self.report("tensor-to-number", node, "a shape is made of the value of a tensor, which must be known")
        self._check_data(node, name, [owner, *arguments], keywords)
        if name in COMPLEX_METHODS or any(value.is_complex for value in (*arguments, *keywords.values())):
            self.report("complex", node)
        if name in DECIDING:
            return TRACED
        self._check_float64(node, arguments, keywords, name)
        if name == "to" and any(ast.unparse(argument) == "torch.bool" for argument in node.args):
            return dataclasses.replace(result, is_mask=True)
        if name in (
            "to",
            "unsqueeze",
            "squeeze",
            "view",
            "reshape",
            "expand",
            "flatten",
            "repeat",
            "contiguous",
            "clone",
        ):
            converted = name == "to" and any("dtype" in ast.unparse(argument) for argument in node.args)
            return dataclasses.replace(result, is_mask=owner.is_mask and not converted)
        return self._result(name, result, several=name in SEVERAL, has_dim=bool(arguments or "dim" in keywords))

    def _result(self, name: str, result: Value, *, several: bool, has_dim: bool) -> Value:
        if several or (name in ("max", "min", "median", "mode") and has_dim):
            return Value(items=result)
        return dataclasses.replace(result, is_mask=name in COMPARING and result.is_tensor)

    def _made(self, node: ast.Call, keywords: Mapping[str, Value], values: list[Value]) -> Value:
        device = next((keyword.value for keyword in node.keywords if keyword.arg == "device"), None)
        is_bool = any(
            keyword.arg == "dtype" and ast.unparse(keyword.value) == "torch.bool" for keyword in node.keywords
        )
        on_host = device is None or (isinstance(device, ast.Constant) and device.value in (None, "cpu"))
        if isinstance(device, ast.Constant) and self.building and str(device.value).split(":")[0] in OTHER_DEVICES:
            self.report("cuda", node, f"a tensor is made on {device.value!r} while the model is built")
        if on_host and not any(value.is_traced for value in values):
            return Value(Place.HOST, is_mask=is_bool, made_at=node.lineno)
        if not on_host:
            self._check_float64(node, [], keywords)
        return dataclasses.replace(TRACED, is_mask=is_bool)

    def _moved(self, node: ast.Call, owner: Value, arguments: list[Value], keywords: Mapping[str, Value]) -> Value:
        text = " ".join(ast.unparse(each) for each in (*node.args, *(keyword.value for keyword in node.keywords)))
        named_device = any(keyword.arg == "device" for keyword in node.keywords) and "cpu" not in text
        if "device" in text or named_device or any(value.is_traced for value in arguments):
            return dataclasses.replace(TRACED, is_mask=owner.is_mask)
        return owner

    def _check_data(self, node: ast.Call, name: str, arguments: list[Value], keywords: Mapping[str, Value]) -> None:
        one_armed = name == "where" and len(arguments) == 1 and not keywords
        repeats = (*arguments[1:2], *(value for key, value in keywords.items() if key == "repeats"))
        repeated = name == "repeat_interleave" and any(value.is_traced for value in repeats)
        if ((name in SHAPED_BY_DATA or one_armed) and arguments and arguments[0].is_traced) or repeated:
            self.report("data-dependent-shape", node)
        if name == "one_hot" and len(arguments) == 1 and "num_classes" not in keywords:
            self.report("tensor-to-number", node, "one_hot without num_classes asks for the largest value of a tensor")

    def _check_float64(
        self, node: ast.Call, arguments: list[Value], keywords: Mapping[str, Value], name: str = ""
    ) -> None:
        if name == "double" or any(value.is_float64 for value in (*arguments, *keywords.values())):
            self.report("float64", node)

    def _check_square(self, node: ast.Call) -> None:
        sizes = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
        if sizes and isinstance(sizes[0], (ast.Tuple, ast.List)):
            sizes = list(sizes[0].elts)
        if (
            len(sizes) >= 2
            and not isinstance(sizes[-1], (ast.Constant, ast.UnaryOp))
            and ast.dump(sizes[-1]) == ast.dump(sizes[-2])
        ):
            self.report("square-mask", node)

    def check_outer_product(self, left: ast.expr, right: ast.expr, *, is_mask: bool) -> None:
        """`m[:, None, :] * m[:, :, None]`: a row of keys by a column of queries."""
        positions = [_new_dimension(side) for side in (left, right)]
        if None not in positions and positions[0] != positions[1]:
            sides = [_base(side) for side in (left, right)]
            if all("mask" in side for side in sides) or (is_mask and sides[0] == sides[1]):
                self.report("square-mask", left)


def is_strided(index: ast.expr) -> bool:
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    steps = [_step(part) for part in parts]
    return any(step is not None and not (isinstance(step, ast.Constant) and step.value in (None, 1)) for step in steps)


def _step(part: ast.expr) -> ast.expr | None:
    if isinstance(part, ast.Slice):
        return part.step
    if isinstance(part, ast.Call) and ast.unparse(part.func) == "slice" and len(part.args) == 3:
        return part.args[2]
    return None


def _new_dimension(node: ast.expr) -> int | None:
    """Where an expression puts a dimension of one."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple):
        positions = [
            index for index, part in enumerate(node.slice.elts) if isinstance(part, ast.Constant) and part.value is None
        ]
        return positions[-1] if positions else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "unsqueeze":
        argument = node.args[0] if node.args else None
        if isinstance(argument, ast.Constant) and isinstance(argument.value, int):
            return argument.value
        if isinstance(argument, ast.UnaryOp) and isinstance(argument.operand, ast.Constant):
            return -int(argument.operand.value)  # type: ignore[arg-type]
    return None


def _base(node: ast.expr) -> str:
    while isinstance(node, (ast.Subscript, ast.Attribute, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return ast.unparse(node)
