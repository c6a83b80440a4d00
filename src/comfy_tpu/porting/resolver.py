"""What names stand for: imported functions, classes of the model's package, attributes, and the arguments of a call."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator, Mapping

from comfy_tpu.porting import vocabulary
from comfy_tpu.porting.calls import Call
from comfy_tpu.porting.source import Definition, Module, dotted_name
from comfy_tpu.porting.values import (
    TRACED,
    TRACED_SEQUENCE,
    UNKNOWN,
    Place,
    Value,
    combine,
    literal_text,
    literal_value,
)

_NUMBER_NAMES = re.compile(
    r"^(num|n|is|use|max|min)_|_?(size|sizes|dim|dims|dtype|device|height|width|shape|length|config|cfg|partition)$"
)
"""Names of arguments without an annotation that are hardly tensors."""


@dataclasses.dataclass
class Scope:
    """The names of a function, or of a module, while the visitor is in it."""

    module: Module
    names: dict[str, Value]
    imports: dict[str, str]
    is_construction: bool = False
    """Whether the code runs on the host, before any program: only what cannot run at all is a trap then."""
    guards: int = 0
    """How many `try` and undecided `if` are around: whoever imports there has thought of the library's absence."""
    result: Value | None = None

    def global_name(self, node: ast.expr) -> str | None:
        """`F.relu` as torch.nn.functional.relu; None for what begins with a local name."""
        root = node
        while isinstance(root, ast.Attribute):
            root = root.value
        return None if isinstance(root, ast.Name) and root.id in self.names else dotted_name(node, self.imports)


def attribute_values(owner: Definition) -> dict[str, Value]:
    """The attributes that `__init__` of a class and its bases set."""
    found: dict[str, Value] = {}
    for each in reversed(owner.bases):
        for statement in each.node.body:
            if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
                for node in ast.walk(statement):
                    found.update(_assigned_attributes(node, each.module))
    return found


def _assigned_attributes(node: ast.AST, module: Module) -> Mapping[str, Value]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "register_buffer":
        name = literal_text(node.args[0] if node.args else None)
        return {} if name is None else {name: TRACED}
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
        return {}
    names = [target.attr for target in node.targets if isinstance(target, ast.Attribute)]
    return dict.fromkeys(names, _constructed_value(node.value, module)) if names else {}


def _constructed_value(call: ast.Call, module: Module) -> Value:
    """What a call in `__init__` makes: a parameter, a list of submodules, a host tensor, an object."""
    name = dotted_name(call.func, module.imports) or ""
    short = name.split(".")[-1]
    if short == "Parameter":
        return TRACED
    if short == "ModuleList":
        inner = (node for node in ast.walk(call) if isinstance(node, ast.Call) and node is not call)
        items = (_constructed_value(node, module) for node in inner)
        item = next((each for each in items if each.instance is not None), None)
        return UNKNOWN if item is None else Value(item=item)
    if name.startswith("torch.") and short in vocabulary.FACTORIES:
        return Value(Place.HOST, origin_line=call.lineno)
    if name in vocabulary.RANDOM_GENERATORS:
        return Value(is_random_generator=True)
    found = module.resolve(name)
    return Value(instance=found) if found is not None and found.is_class else UNKNOWN


def constructed_classes(owner: Definition) -> Iterator[Definition]:
    """Classes of the package that a class names in `__init__` or its body: submodules and attention processors."""
    initial = owner.methods.get("__init__")
    body = [(initial.module, statement) for statement in initial.node.body] if initial is not None else []
    body += [(owner.module, each) for each in owner.node.body if isinstance(each, (ast.Assign, ast.AnnAssign))]
    for module, statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                found = module.resolve(node.id)
                if found is not None and found.is_class:
                    yield found


def bind_arguments(call: Call, function: Definition, owner: Value | None) -> dict[str, Value]:
    """The values of a function's parameters in a call; `owner` is the object whose method it is."""
    given = call.arguments
    if owner is not None and "staticmethod" not in function.decorators:
        given = [owner, *given]
    if "**" in call.keywords or any(isinstance(each, ast.Starred) for each in call.node.args):
        bound = expected_arguments(function, owner.instance if owner else None)
    else:
        bound = {
            argument.arg: literal_value(default.value) if isinstance(default, ast.Constant) else UNKNOWN
            for argument, default in _parameters(function.arguments)
        }
    positional = [*function.arguments.posonlyargs, *function.arguments.args]
    bound.update(zip((each.arg for each in positional), given, strict=False))
    bound.update({name: value for name, value in call.keywords.items() if name in bound})
    if function.arguments.vararg is not None:
        bound[function.arguments.vararg.arg] = Value(item=combine(*given[len(positional) :]))
    return bound


def expected_arguments(function: Definition, owner: Definition | None) -> dict[str, Value]:
    """The arguments of a function whose call nobody sees, by annotations, defaults and names."""
    values = {argument.arg: _expected_value(argument, default) for argument, default in _parameters(function.arguments)}
    if owner is not None and values:
        values[next(iter(values))] = Value(instance=owner)
    return values


def _parameters(arguments: ast.arguments) -> Iterator[tuple[ast.arg, ast.expr | None]]:
    """Parameters with their defaults, without `*args` and `**kwargs`."""
    positional = [*arguments.posonlyargs, *arguments.args]
    required = [None] * (len(positional) - len(arguments.defaults))
    yield from zip(positional, [*required, *arguments.defaults], strict=True)
    yield from zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)


def _expected_value(argument: ast.arg, default: ast.expr | None) -> Value:
    if argument.annotation is not None:
        text = ast.unparse(argument.annotation).strip("'\"")
        if re.search(r"[Ll]ist\[|[Tt]uple\[", text) and "Tensor" in text:
            return TRACED_SEQUENCE
        is_tensor = "Tensor" in text and "dict" not in text.lower()
    else:
        is_tensor = default is None and not _NUMBER_NAMES.search(argument.arg)
    return dataclasses.replace(TRACED, is_mask="mask" in argument.arg) if is_tensor else UNKNOWN
