"""What calls of Python's, numpy's and torch's functions and of tensors' methods return, and the traps in them."""

from __future__ import annotations

import ast
import dataclasses

from comfy_tpu.porting import vocabulary
from comfy_tpu.porting.values import TRACED, UNKNOWN, Place, Value, combine, known_truth, sequence


@dataclasses.dataclass
class Call:
    """A call with evaluated arguments, and the traps that its evaluation found."""

    node: ast.Call
    arguments: list[Value]
    keywords: dict[str, Value]
    """Values by parameter name; `**` for unpacked ones."""
    is_construction: bool = False
    """Whether the call is part of a model's construction."""
    traps: list[tuple[str, str | None]] = dataclasses.field(default_factory=list)
    """Name and reason; None: the trap's usual reason."""

    def report(self, trap: str, reason: str | None = None) -> None:
        self.traps.append((trap, reason))

    @property
    def first(self) -> Value:
        return self.arguments[0] if self.arguments else UNKNOWN

    @property
    def values(self) -> list[Value]:
        return [*self.arguments, *self.keywords.values()]

    def keyword_source(self, name: str) -> ast.expr | None:
        return next((keyword.value for keyword in self.node.keywords if keyword.arg == name), None)


def call_global(name: str, call: Call) -> Value | None:
    """The result of a function by its dotted name; None for a name of the model's own package or another library."""
    if name in vocabulary.FALSE_ON_TPU:
        return known_truth(False)
    if name.startswith(("random.", "numpy.random.")):
        call.report("python-random")
        return UNKNOWN
    if name.startswith("torch.cuda."):
        if name.split(".")[2] not in vocabulary.HARMLESS_CUDA:
            call.report("cuda", f"{name} is called, which fails where there is no NVIDIA GPU")
        return UNKNOWN
    if name.startswith("torch.distributed."):
        if name.split(".")[2] not in vocabulary.HARMLESS_DISTRIBUTED:
            call.report("distributed")
        return call.first if call.first.is_traced else UNKNOWN
    if name.startswith("torch."):
        return _call_torch(name.removeprefix("torch."), call)
    if name.startswith("einops."):
        return combine(*call.arguments)
    if name in vocabulary.NUMBER_FUNCTIONS:
        if any(value.is_traced for value in call.arguments):
            call.report("tensor-to-number")
        return UNKNOWN
    return _call_builtin(name, call)


def _call_builtin(name: str, call: Call) -> Value | None:
    match name:
        case "isinstance" if call.first.is_tensor and len(call.node.args) == 2:
            return known_truth("Tensor" in ast.unparse(call.node.args[1]))
        case "any" | "all":
            if call.first.item is not None and call.first.item.is_traced:
                call.report("tensor-condition")
            return UNKNOWN
        case "isinstance" | "hasattr":
            return UNKNOWN
        case "sum":
            return call.first.item or UNKNOWN
        case "list" | "tuple" | "reversed" | "sorted" | "iter":
            return call.first if call.arguments else Value(item=UNKNOWN)
        case "zip":
            return Value(item=sequence([value.loop_variable for value in call.arguments]))
        case "enumerate":
            return Value(item=sequence([UNKNOWN, call.first.loop_variable]))
    return None


def _call_torch(name: str, call: Call) -> Value:
    """The result of `torch.<name>(...)`."""
    if name == "_assert":
        if call.first.is_traced:
            call.report("tensor-assert")
        return UNKNOWN
    if name == "is_tensor":
        return known_truth(True) if call.first.is_tensor else UNKNOWN
    short = name.split(".")[-1]
    if short in vocabulary.METADATA_FUNCTIONS or short[:1].isupper():
        return UNKNOWN
    if name in vocabulary.RANDOM_FUNCTIONS:
        call.report("random-in-forward")
        return _factory_result(call)
    if name in vocabulary.FACTORIES:
        _check_square(call)
        if name in vocabulary.SIZE_FACTORIES and any(value.is_traced for value in call.arguments):
            call.report("tensor-to-number", "the size of a tensor is the value of another, and must be known")
        return _factory_result(call)
    if name.startswith("fft.") and combine(*call.values).is_traced:
        call.report("complex")
    training = call.keywords.get("training", (*call.arguments[2:3], UNKNOWN)[0])
    if name == "nn.functional.dropout" and call.first.is_traced and training.truth:
        call.report("random-in-forward")
    return _call_operation(short, call)


def call_tensor_method(name: str, owner: Value, call: Call) -> Value:
    """The result of `owner.<name>(...)`, where the owner is a tensor."""
    if name == "cuda":
        call.report("cuda", ".cuda() is called, which fails where there is no NVIDIA GPU")
        return TRACED
    if name in vocabulary.METADATA_FUNCTIONS and not (name == "type" and call.arguments):
        return UNKNOWN
    if name in vocabulary.NUMBER_METHODS:
        if owner.is_traced:
            call.report("tensor-to-number")
        return UNKNOWN
    if name in vocabulary.RANDOM_METHODS:
        call.report("random-in-forward")
    is_written = name.endswith("_") and not name.endswith("__")
    if owner.is_host:
        if name in ("to", "type_as"):
            return _move_result(owner, call)
        if not combine(*call.values).is_traced:
            return dataclasses.replace(owner, is_mask=name in vocabulary.COMPARISONS or owner.is_mask)
        if is_written:
            call.report("host-tensor-written", host_write_reason(owner))
    if is_written and owner.is_strided:
        call.report("strided-write")
    if name in vocabulary.NEW_METHODS or (name == "expand" and owner.is_mask):
        _check_square(call)
    # `*shape` is a shape as a rule, and the rule is easier to see than the shape.
    sizes = (
        value for value, node in zip(call.arguments, call.node.args, strict=True) if not isinstance(node, ast.Starred)
    )
    if name in vocabulary.SIZE_METHODS and any(value.is_traced for value in sizes):
        call.report("tensor-to-number", "a shape is made of the value of a tensor, which must be known")
    if name == "double":
        call.report("float64")
    return _call_operation(name, dataclasses.replace(call, arguments=[owner, *call.arguments]))  # with the same traps


def _call_operation(name: str, call: Call) -> Value:
    """The result of a function of tensors, or of a method with its owner as first argument."""
    values = [*call.values, *(value.item for value in call.arguments if value.item is not None)]
    result = combine(*values)
    if result.is_traced:
        _check_operation(name, call, values)
        if name in vocabulary.BOOL_RESULTS:
            return TRACED
    elif not result.is_tensor and name.endswith("_like"):
        result = TRACED
    has_indices = name in vocabulary.REDUCTIONS_WITH_INDICES and (len(call.arguments) > 1 or "dim" in call.keywords)
    if name in vocabulary.MULTIPLE_RESULTS or has_indices:
        return Value(item=result)
    is_mask = result.is_tensor and name in vocabulary.COMPARISONS
    if name in vocabulary.MASK_FORMS:
        is_mask = call.first.is_mask
    if name == "to":
        texts = [ast.unparse(argument) for argument in call.node.args]
        is_mask = "torch.bool" in texts or (is_mask and not any("dtype" in text for text in texts))
    return dataclasses.replace(result, is_mask=is_mask, origin_line=call.first.origin_line if result.is_host else 0)


def _check_operation(name: str, call: Call, values: list[Value]) -> None:
    """Reports the traps of an operation on traced tensors."""
    is_index_search = name == "where" and len(call.values) == 1
    if (name in vocabulary.DATA_DEPENDENT or is_index_search) and call.first.is_traced:
        call.report("data-dependent-shape")
    repeats = (*call.arguments[1:2], call.keywords.get("repeats", UNKNOWN))
    if name == "repeat_interleave" and any(value.is_traced for value in repeats):
        call.report("data-dependent-shape")
    if name == "one_hot" and len(call.arguments) == 1 and "num_classes" not in call.keywords:
        call.report("tensor-to-number", "one_hot without num_classes asks for the largest value of a tensor")
    if name in vocabulary.COMPLEX_RESULTS or any(value.is_complex for value in values):
        call.report("complex")
    if any(value.is_float64 for value in call.values) and name not in vocabulary.BOOL_RESULTS:
        call.report("float64")
    out = call.keywords.get("out", UNKNOWN)
    if out.is_host:
        call.report("host-tensor-written", host_write_reason(out))


def host_write_reason(tensor: Value) -> str:
    return (
        f"a tensor made on the host, for want of a device (line {tensor.origin_line}), is written with values of the "
        "program"
    )


def _factory_result(call: Call) -> Value:
    """A new tensor: on the host unless its device or its values say otherwise."""
    device, dtype = call.keyword_source("device"), call.keyword_source("dtype")
    is_mask = dtype is not None and ast.unparse(dtype) == "torch.bool"
    on_host = device is None or (isinstance(device, ast.Constant) and device.value in (None, "cpu"))
    name = str(device.value) if isinstance(device, ast.Constant) else ""
    if call.is_construction and name.split(":")[0] in vocabulary.OTHER_DEVICES:
        call.report("cuda", f"a tensor is made on {name!r} while the model is built")
    if on_host and not any(value.contains_traced for value in call.values):
        return Value(Place.HOST, is_mask=is_mask, origin_line=call.node.lineno)
    if not on_host and any(value.is_float64 for value in call.keywords.values()):
        call.report("float64")
    return dataclasses.replace(TRACED, is_mask=is_mask)


def _move_result(owner: Value, call: Call) -> Value:
    """A host tensor after `to`: in the program if a device or a traced tensor is among the arguments."""
    text = " ".join(ast.unparse(each) for each in (*call.node.args, *(each.value for each in call.node.keywords)))
    has_device = call.keyword_source("device") is not None and "cpu" not in text
    if "device" in text or has_device or any(value.is_traced for value in call.arguments):
        return dataclasses.replace(TRACED, is_mask=owner.is_mask)
    return owner


def _check_square(call: Call) -> None:
    """A shape that ends with the same size twice, `torch.ones(tokens, tokens)`, is that of a mask."""
    sizes = [argument for argument in call.node.args if not isinstance(argument, ast.Starred)]
    if sizes and isinstance(sizes[0], (ast.Tuple, ast.List)):
        sizes = sizes[0].elts
    if len(sizes) < 2 or isinstance(sizes[-1], (ast.Constant, ast.UnaryOp)):
        return
    if ast.dump(sizes[-1]) == ast.dump(sizes[-2]):
        call.report("square-mask")


def is_outer_product(left: ast.expr, right: ast.expr, *, are_masks: bool) -> bool:
    """Whether a row of keys meets a column of queries: `m[:, None, :] * m[:, :, None]`."""
    axes = [_new_axis(side) for side in (left, right)]
    if None in axes or axes[0] == axes[1]:
        return False
    roots = [_root_name(side) for side in (left, right)]
    return all("mask" in root for root in roots) or (are_masks and roots[0] == roots[1])


def _new_axis(node: ast.expr) -> int | None:
    """Where an expression inserts an axis: by `None` in an index, or by `unsqueeze`."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple):
        parts = enumerate(node.slice.elts)
        return max((i for i, part in parts if isinstance(part, ast.Constant) and part.value is None), default=None)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "unsqueeze":
        try:
            return int(ast.literal_eval(node.args[0]))
        except (IndexError, ValueError, TypeError):
            return None
    return None


def _root_name(node: ast.expr) -> str:
    while isinstance(node, (ast.Subscript, ast.Attribute, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return ast.unparse(node)


def is_strided(index: ast.expr) -> bool:
    """Whether an index has a step other than one."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    steps = (_step(part) for part in parts)
    return any(step is not None and not (isinstance(step, ast.Constant) and step.value in (None, 1)) for step in steps)


def _step(part: ast.expr) -> ast.expr | None:
    if isinstance(part, ast.Slice):
        return part.step
    if isinstance(part, ast.Call) and ast.unparse(part.func) == "slice" and len(part.args) == 3:
        return part.args[2]
    return None
