"""What calls of torch's functions and of tensors' methods return, and the traps in them."""

from __future__ import annotations

import ast
import dataclasses

from comfy_tpu.porting.calls import Call
from comfy_tpu.porting.values import TRACED, UNKNOWN, Place, Value, combine, known_truth
from comfy_tpu.porting.vocabulary import (
    BOOL_RESULTS,
    COMPARISONS,
    COMPLEX_RESULTS,
    DATA_DEPENDENT,
    DESCRIBING,
    FACTORIES,
    FACTORIES_OF_SIZES,
    MASK_PRESERVING,
    METHODS_OF_SIZES,
    MULTIPLE_RESULTS,
    NEW_METHODS,
    OTHER_DEVICES,
    RANDOM_FUNCTIONS,
    RANDOM_METHODS,
    REDUCTIONS_WITH_INDICES,
    TO_NUMBER_METHODS,
)


def call_torch(name: str, call: Call) -> Value:
    """The result of `torch.<name>(...)`."""
    if name == "_assert":
        if call.first.is_traced:
            call.report("tensor-assert")
        return UNKNOWN
    if name == "is_tensor":
        return known_truth(True) if call.first.is_tensor else UNKNOWN
    short = name.split(".")[-1]
    if short in DESCRIBING or short[:1].isupper():
        return UNKNOWN
    if name in RANDOM_FUNCTIONS:
        call.report("random-in-forward")
        return _made(call)
    if name in FACTORIES:
        _check_square(call)
        if name in FACTORIES_OF_SIZES and any(value.is_traced for value in call.arguments):
            call.report("tensor-to-number", "the size of a tensor is the value of another, and must be known")
        return _made(call)
    if name.startswith("fft.") and combine(*call.values).is_traced:
        call.report("complex")
    training = call.keywords.get("training", (*call.arguments[2:3], UNKNOWN)[0])
    if name == "nn.functional.dropout" and call.first.is_traced and training.truth:
        call.report("random-in-forward")
    return _operation(short, call)


def call_tensor_method(name: str, owner: Value, call: Call) -> Value:
    """The result of `owner.<name>(...)`, where the owner is a tensor."""
    if name == "cuda":
        call.report("cuda", ".cuda() is called, which fails where there is no NVIDIA GPU")
        return TRACED
    if name in DESCRIBING and not (name == "type" and call.arguments):
        return UNKNOWN
    if name in TO_NUMBER_METHODS:
        if owner.is_traced:
            call.report("tensor-to-number")
        return UNKNOWN
    if name in RANDOM_METHODS:
        call.report("random-in-forward")
    is_written = name.endswith("_") and not name.endswith("__")
    if owner.is_host:
        if name in ("to", "type_as"):
            return _moved(owner, call)
        if not combine(*call.values).is_traced:
            return dataclasses.replace(owner, is_mask=name in COMPARISONS or owner.is_mask)
        if is_written:
            call.report("host-tensor-written", host_write_reason(owner))
    if is_written and owner.is_strided:
        call.report("strided-write")
    if name in NEW_METHODS or (name == "expand" and owner.is_mask):
        _check_square(call)
    # `*shape` is a shape as a rule, and the rule is easier to see than the shape.
    sizes = (value for value, size in zip(call.arguments, call.node.args, strict=True) if _is_single(size))
    if name in METHODS_OF_SIZES and any(value.is_traced for value in sizes):
        call.report("tensor-to-number", "a shape is made of the value of a tensor, which must be known")
    if name == "double":
        call.report("float64")
    return _operation(name, dataclasses.replace(call, arguments=[owner, *call.arguments]))  # with the same traps


def _operation(name: str, call: Call) -> Value:
    """The result of a function of tensors, or of a method with its owner as first argument."""
    values = [*call.values, *(value.item for value in call.arguments if value.item is not None)]
    result = combine(*values)
    if result.is_traced:
        _check_traced(name, call, values)
    elif not result.is_tensor and name.endswith("_like"):
        result = TRACED
    if name in BOOL_RESULTS and result.is_traced:
        return TRACED
    if name in MULTIPLE_RESULTS or (
        name in REDUCTIONS_WITH_INDICES and (len(call.arguments) > 1 or "dim" in call.keywords)
    ):
        return Value(item=result)
    is_mask = result.is_tensor and name in COMPARISONS
    if name in MASK_PRESERVING:
        is_mask = call.first.is_mask
    if name == "to":
        texts = [ast.unparse(argument) for argument in call.node.args]
        is_mask = "torch.bool" in texts or (is_mask and not any("dtype" in text for text in texts))
    made_at = call.first.made_at if result.is_host else 0
    return dataclasses.replace(result, is_mask=is_mask, made_at=made_at)


def _check_traced(name: str, call: Call, values: list[Value]) -> None:
    is_index_search = name == "where" and len(call.values) == 1
    if (name in DATA_DEPENDENT or is_index_search) and call.first.is_traced:
        call.report("data-dependent-shape")
    repeats = (*call.arguments[1:2], call.keywords.get("repeats", UNKNOWN))
    if name == "repeat_interleave" and any(value.is_traced for value in repeats):
        call.report("data-dependent-shape")
    if name == "one_hot" and len(call.arguments) == 1 and "num_classes" not in call.keywords:
        call.report("tensor-to-number", "one_hot without num_classes asks for the largest value of a tensor")
    if name in COMPLEX_RESULTS or any(value.is_complex for value in values):
        call.report("complex")
    if any(value.is_float64 for value in call.values) and name not in BOOL_RESULTS:
        call.report("float64")
    out = call.keywords.get("out", UNKNOWN)
    if out.is_host:
        call.report("host-tensor-written", host_write_reason(out))


def host_write_reason(tensor: Value) -> str:
    return (
        f"a tensor made on the host, for want of a device (line {tensor.made_at}), is written with values of the "
        "program"
    )


def _made(call: Call) -> Value:
    """The result of a factory: on the host unless its device or its values say otherwise."""
    device, dtype = call.keyword_source("device"), call.keyword_source("dtype")
    is_mask = dtype is not None and ast.unparse(dtype) == "torch.bool"
    on_host = device is None or (isinstance(device, ast.Constant) and device.value in (None, "cpu"))
    if isinstance(device, ast.Constant) and call.building and str(device.value).split(":")[0] in OTHER_DEVICES:
        call.report("cuda", f"a tensor is made on {device.value!r} while the model is built")
    if on_host and not any(value.contains_traced for value in call.values):
        return Value(Place.HOST, is_mask=is_mask, made_at=call.node.lineno)
    if not on_host and any(value.is_float64 for value in call.keywords.values()):
        call.report("float64")
    return dataclasses.replace(TRACED, is_mask=is_mask)


def _moved(owner: Value, call: Call) -> Value:
    """A host tensor after `to`: in the program if a device or a traced tensor is among the arguments."""
    text = " ".join(ast.unparse(each) for each in (*call.node.args, *(each.value for each in call.node.keywords)))
    has_device = call.keyword_source("device") is not None and "cpu" not in text
    if "device" in text or has_device or any(value.is_traced for value in call.arguments):
        return dataclasses.replace(TRACED, is_mask=owner.is_mask)
    return owner


def _is_single(argument: ast.expr) -> bool:
    return not isinstance(argument, ast.Starred)


def _check_square(call: Call) -> None:
    """A shape that ends with the same size twice, `torch.ones(tokens, tokens)`, is that of a mask."""
    sizes = [argument for argument in call.node.args if _is_single(argument)]
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
