"""Reading calls: of torch, of the package itself and of submodules; what is written in Python is followed."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import TYPE_CHECKING

from comfy_tpu.porting.arguments import default_arguments, expected_arguments
from comfy_tpu.porting.attributes import attributes_of
from comfy_tpu.porting.source import Definition, Module, definition_of, dotted_name, method
from comfy_tpu.porting.torch_calls import TorchCallReading
from comfy_tpu.porting.values import UNKNOWN, Value, computed, joined, known, several
from comfy_tpu.porting.vocabulary import FALSE_HERE, NUMBERS_OF, PROPERTIES, QUIET_CUDA, QUIET_DISTRIBUTED

if TYPE_CHECKING:
    from comfy_tpu.porting.reading import Reader


class CallReading(TorchCallReading):
    """The part of reading a function that is about its calls."""

    reader: Reader
    module: Module
    names: dict[str, Value]
    imports: dict[str, str]

    def dotted(self, node: ast.expr) -> str | None:
        """The name of something imported; None for a local name."""
        root = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if not isinstance(root, ast.Name) or root.id in self.names:
            return None
        return dotted_name(node, self.imports)

    def attribute_of(self, node: ast.Attribute, owner: Value) -> Value:
        if owner.instance is None:
            return UNKNOWN
        found = method(owner.instance, node.attr)
        if found is not None and any(name.split(".")[-1] in PROPERTIES for name in _decorators(found)):
            return self.reader.read_function(found, {"self": owner}, building=self.building)
        return attributes_of(owner.instance).get(node.attr, UNKNOWN)

    def _value_of_Call(self, node: ast.Call) -> Value:  # noqa: N802
        arguments = [self.value(argument) for argument in node.args]
        keywords = {keyword.arg or "**": self.value(keyword.value) for keyword in node.keywords}
        name = self.dotted(node.func)
        if name is not None:
            called = self._named(node, name, arguments, keywords)
            if called is not None:
                return called
        if isinstance(node.func, ast.Attribute):
            owner = self.value(node.func.value)
            if owner.items is not None and node.func.attr in ("append", "extend", "insert"):
                return self._grown(node.func, owner, arguments)
            if owner.named is not None:
                return self._of_dict(node, node.func, owner)
            if owner.is_tensor or (node.func.attr == "cuda" and owner.instance is None and owner.items is None):
                return self.tensor_method(node, owner, node.func.attr, arguments, keywords)
            if owner.is_random:
                self.report("python-random", node)
                return UNKNOWN
            if owner.instance is not None:
                found = method(owner.instance, node.func.attr)
                if found is not None:
                    return self._followed(node, found, arguments, keywords, owner)
        called_object = self.value(node.func)
        if called_object.function is not None:
            return self._followed(node, called_object.function, arguments, keywords, around=self.names)
        if called_object.instance is not None:
            found = method(called_object.instance, "forward") or method(called_object.instance, "__call__")
            if found is not None:
                return self._followed(node, found, arguments, keywords, called_object)
        return computed(*arguments, *keywords.values())

    def _of_dict(self, node: ast.Call, called: ast.Attribute, owner: Value) -> Value:
        if called.attr in ("get", "setdefault") and node.args:
            return owner.entry(node.args[0])
        if called.attr not in ("keys", "items", "values", "copy") and isinstance(called.value, ast.Name):
            self.names[called.value.id] = UNKNOWN  # update, pop, clear
        return UNKNOWN

    def _grown(self, called: ast.Attribute, owner: Value, arguments: list[Value]) -> Value:
        added = arguments[-1] if arguments else UNKNOWN
        added = (added.items or UNKNOWN) if called.attr == "extend" else added
        if isinstance(called.value, ast.Name):
            empty = owner.parts == ()
            self.names[called.value.id] = Value(items=added if empty else joined(owner.items or UNKNOWN, added))
        return UNKNOWN

    def _followed(
        self,
        node: ast.Call,
        found: Definition,
        arguments: list[Value],
        keywords: Mapping[str, Value],
        owner: Value | None = None,
        around: Mapping[str, Value] | None = None,
    ) -> Value:
        assert not isinstance(found.node, ast.ClassDef)
        if owner is not None and "staticmethod" not in _decorators(found):
            arguments = [owner, *arguments]
        parameters = [*found.node.args.posonlyargs, *found.node.args.args]
        bound = default_arguments(found.node.args)
        if any(isinstance(argument, ast.Starred) for argument in node.args) or "**" in keywords:
            bound = expected_arguments(found, owner.instance if owner else None)
        bound.update(zip((each.arg for each in parameters), arguments, strict=False))
        bound.update({name: value for name, value in keywords.items() if name in bound})
        if found.node.args.vararg is not None:
            bound[found.node.args.vararg.arg] = Value(items=computed(*arguments[len(parameters) :]))
        return self.reader.read_function(found, {**(around or {}), **bound}, building=self.building)

    def _named(self, node: ast.Call, name: str, arguments: list[Value], keywords: Mapping[str, Value]) -> Value | None:
        """A call by name; None if the name is nothing that is known."""
        if name in FALSE_HERE:
            return known(False)
        root, _, rest = name.partition(".")
        if name.startswith("torch.cuda."):
            if name.split(".")[2] not in QUIET_CUDA:
                self.report("cuda", node, f"{name} is called, which fails where there is no NVIDIA GPU")
            return UNKNOWN
        if name.startswith("torch.distributed."):
            if name.split(".")[2] not in QUIET_DISTRIBUTED:
                self.report("distributed", node)
            return arguments[0] if arguments and arguments[0].is_traced else UNKNOWN
        if root == "torch":
            return self.torch_function(node, rest, arguments, keywords)
        if root == "random" or name.startswith("numpy.random."):
            self.report("python-random", node)
            return UNKNOWN
        if root == "einops" and arguments:
            return computed(*arguments)
        if name in ("isinstance", "hasattr"):
            return self._isinstance(node, arguments) if name == "isinstance" else UNKNOWN
        if name in NUMBERS_OF:
            if any(value.is_traced for value in arguments):
                self.report("tensor-to-number", node)
            return UNKNOWN
        if name in ("sum", "any", "all"):
            items = arguments[0].items if arguments and arguments[0].items else UNKNOWN
            if items.is_traced and name != "sum":
                self.report("tensor-condition", node)
            return items if name == "sum" else UNKNOWN
        if name in ("list", "tuple", "reversed", "sorted", "iter"):
            return arguments[0] if arguments else Value(items=UNKNOWN)
        if name == "zip":
            return Value(items=several([value.each for value in arguments]))
        if name == "enumerate":
            return Value(items=several([UNKNOWN, arguments[0].each if arguments else UNKNOWN]))
        found = definition_of(name, self.module, self.imports)
        if found is None:
            return UNKNOWN  # a builtin, or a library's
        if found.is_class:
            return Value(instance=found)
        return self._followed(node, found, arguments, keywords)

    def _isinstance(self, node: ast.Call, arguments: list[Value]) -> Value:
        if arguments and arguments[0].is_tensor and len(node.args) == 2:
            return known("Tensor" in ast.unparse(node.args[1]))
        return UNKNOWN


def _decorators(found: Definition) -> set[str]:
    return {ast.unparse(decorator) for decorator in found.node.decorator_list}
