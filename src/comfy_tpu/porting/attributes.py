"""What the attributes are that a class gives its objects when it is built."""

from __future__ import annotations

import ast
import functools

from comfy_tpu.porting.source import Definition, Module, bases, definition_of, dotted_name
from comfy_tpu.porting.values import TRACED, UNKNOWN, Place, Value
from comfy_tpu.porting.vocabulary import GENERATORS, MAKING


@functools.cache
def attributes_of(definition: Definition) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for each in reversed(bases(definition)):
        initial = next(
            (node for node in each.node.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"), None
        )
        for node in ast.walk(initial) if initial is not None else ():
            found.update(_given(node, each.module))
    return found


def _given(node: ast.AST, module: Module) -> dict[str, Value]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "register_buffer":
        name = node.args[0] if node.args else None
        return {str(name.value): TRACED} if isinstance(name, ast.Constant) else {}
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
        return {}
    names = [target.attr for target in node.targets if isinstance(target, ast.Attribute)]
    return dict.fromkeys(names, _built(node.value, module)) if names else {}


def _built(call: ast.Call, module: Module) -> Value:
    name = dotted_name(call.func, module.imports) or ""
    if name.split(".")[-1] == "Parameter":
        return TRACED
    if name.split(".")[-1] == "ModuleList":
        for node in ast.walk(call):
            if isinstance(node, ast.Call) and node is not call:
                item = _built(node, module)
                if item.instance is not None:
                    return Value(items=item)
        return UNKNOWN
    if name.startswith("torch.") and name.split(".")[-1] in MAKING:
        return Value(Place.HOST, made_at=call.lineno)
    if name in GENERATORS:
        return Value(is_random=True)
    found = definition_of(name, module, module.imports)
    return Value(instance=found) if found is not None and found.is_class else UNKNOWN
