"""What names stand for: imported functions, classes of the model's package, attributes, and the arguments of a call."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator, Mapping

from comfy_tpu.porting.calls import Call
from comfy_tpu.porting.source import Definition, Module, bases, definition_of, dotted_name, method
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
from comfy_tpu.porting.vocabulary import FACTORIES, PROPERTY_DECORATORS, RANDOM_GENERATORS

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
    building: bool = False
    """Whether it runs on the host, before any program: only what cannot run at all is a trap then."""
    guards: int = 0
    """How many `try` and undecided `if` are around: whoever imports there has thought of the library's absence."""
    returned: Value | None = None

    def global_name(self, node: ast.expr) -> str | None:
        """`F.relu` as torch.nn.functional.relu; None for what begins with a local name."""
        root = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if not isinstance(root, ast.Name) or root.id in self.names:
            return None
        return dotted_name(node, self.imports)

    def definition(self, name: str) -> Definition | None:
        return definition_of(name, self.module, self.imports)


class Resolver:
    """Members of classes and arguments of functions, remembered while a model is read."""

    def __init__(self) -> None:
        self._attributes: dict[Definition, dict[str, Value]] = {}
        self._methods: dict[tuple[ast.AST, str], Definition | None] = {}

    def method(self, owner: Definition, *names: str) -> Definition | None:
        """The first of these methods that a class or its bases define."""
        for name in names:
            key = (owner.node, name)
            if key not in self._methods:
                self._methods[key] = method(owner, name)
            if self._methods[key] is not None:
                return self._methods[key]
        return None

    def property_getter(self, owner: Definition, name: str) -> Definition | None:
        found = self.method(owner, name)
        names = {decorator.split(".")[-1] for decorator in _decorators(found)} if found is not None else set()
        return found if names & PROPERTY_DECORATORS else None

    def attribute(self, owner: Definition, name: str) -> Value:
        """An attribute that `__init__` sets."""
        if owner not in self._attributes:
            found: dict[str, Value] = {}
            for each in reversed(bases(owner)):
                for statement in each.node.body:
                    if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
                        for node in ast.walk(statement):
                            found.update(_assigned_attributes(node, each.module))
            self._attributes[owner] = found
        return self._attributes[owner].get(name, UNKNOWN)

    def bind(self, call: Call, function: Definition, owner: Value | None) -> dict[str, Value]:
        """The values of a function's parameters in a call; `owner` is the object whose method it is."""
        given = call.arguments
        if owner is not None and "staticmethod" not in _decorators(function):
            given = [owner, *given]
        parameters = _parameters(function)
        is_unpacked = "**" in call.keywords or any(isinstance(each, ast.Starred) for each in call.node.args)
        if is_unpacked:
            bound = expected_arguments(function, owner.instance if owner else None)
        else:
            bound = {
                name: literal_value(default.value) if isinstance(default, ast.Constant) else UNKNOWN
                for name, (_, default) in parameters.items()
            }
        assert not isinstance(function.node, ast.ClassDef)
        arguments = function.node.args
        positional = [*arguments.posonlyargs, *arguments.args]
        bound.update(zip((each.arg for each in positional), given, strict=False))
        bound.update({name: value for name, value in call.keywords.items() if name in bound})
        if arguments.vararg is not None:
            bound[arguments.vararg.arg] = Value(item=combine(*given[len(positional) :]))
        return bound


def _decorators(function: Definition) -> set[str]:
    return {ast.unparse(decorator) for decorator in function.node.decorator_list}


def _parameters(function: Definition) -> dict[str, tuple[ast.arg, ast.expr | None]]:
    """Parameters and their defaults by name, without `*args` and `**kwargs`."""
    assert not isinstance(function.node, ast.ClassDef)
    arguments = function.node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    parameters = [*positional, *arguments.kwonlyargs]
    defaults = [*[None] * required, *arguments.defaults, *arguments.kw_defaults]
    return {each.arg: (each, default) for each, default in zip(parameters, defaults, strict=True)}


def expected_arguments(function: Definition, owner: Definition | None) -> dict[str, Value]:
    """The arguments of a function whose call nobody sees, by annotations, defaults and names."""
    parameters = _parameters(function)
    values = {name: _expected(argument, default) for name, (argument, default) in parameters.items()}
    if owner is not None and values:
        values[next(iter(values))] = Value(instance=owner)
    return values


def _expected(argument: ast.arg, default: ast.expr | None) -> Value:
    if argument.annotation is not None:
        text = ast.unparse(argument.annotation).strip("'\"")
        if re.search(r"[Ll]ist\[|[Tt]uple\[", text) and "Tensor" in text:
            return TRACED_SEQUENCE
        is_tensor = "Tensor" in text and "dict" not in text.lower()
    else:
        is_tensor = default is None and not _NUMBER_NAMES.search(argument.arg)
    return dataclasses.replace(TRACED, is_mask="mask" in argument.arg) if is_tensor else UNKNOWN


def _assigned_attributes(node: ast.AST, module: Module) -> Mapping[str, Value]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "register_buffer":
        name = literal_text(node.args[0] if node.args else None)
        return {} if name is None else {name: TRACED}
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
        return {}
    names = [target.attr for target in node.targets if isinstance(target, ast.Attribute)]
    return dict.fromkeys(names, _constructed(node.value, module)) if names else {}


def _constructed(call: ast.Call, module: Module) -> Value:
    """What a call in `__init__` makes: a parameter, a list of submodules, a host tensor, an object."""
    name = dotted_name(call.func, module.imports) or ""
    short = name.split(".")[-1]
    if short == "Parameter":
        return TRACED
    if short == "ModuleList":
        inner = (node for node in ast.walk(call) if isinstance(node, ast.Call) and node is not call)
        items = (_constructed(node, module) for node in inner)
        item = next((each for each in items if each.instance is not None), None)
        return UNKNOWN if item is None else Value(item=item)
    if name.startswith("torch.") and short in FACTORIES:
        return Value(Place.HOST, made_at=call.lineno)
    if name in RANDOM_GENERATORS:
        return Value(is_random_generator=True)
    found = definition_of(name, module, module.imports)
    return Value(instance=found) if found is not None and found.is_class else UNKNOWN


def constructed_classes(owner: Definition, initial: Definition | None) -> Iterator[Definition]:
    """Classes of the package that a class names in `__init__` or its body: submodules and attention processors."""
    body: list[tuple[Module, ast.stmt]] = []
    if initial is not None:
        body += [(initial.module, statement) for statement in initial.node.body]
    body += [(owner.module, each) for each in owner.node.body if isinstance(each, (ast.Assign, ast.AnnAssign))]
    for module, statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                found = definition_of(node.id, module, module.imports)
                if found is not None and found.is_class:
                    yield found
