"""The static reader: one visitor that evaluates a model's methods on abstract values, and runs nothing of them.

Every expression has a `Value`. The unknown is never reported: a trap is one only where a tensor of the program is
certainly in it.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
from collections.abc import Mapping, Sequence

from comfy_tpu.porting.calls import Call, call_global
from comfy_tpu.porting.resolver import Resolver, Scope, constructed_classes, expected_arguments
from comfy_tpu.porting.source import Definition, Module
from comfy_tpu.porting.statements import StatementVisitor
from comfy_tpu.porting.torch_calls import call_tensor_method, call_torch, is_outer_product, is_strided
from comfy_tpu.porting.values import UNKNOWN, Value, combine, join, known_truth, literal_text, literal_value, sequence
from comfy_tpu.porting.vocabulary import (
    COMPLEX_DTYPES,
    FALSE_ATTRIBUTES,
    FALSE_ON_TPU,
    FLOAT64_DTYPES,
    OTHER_DEVICES,
    TENSOR_ATTRIBUTES,
)

EVALUATIONS_MAX = 12
"""How often one function is evaluated, for different arguments."""


class SourceVisitor(StatementVisitor):
    """Evaluates a class from its entry points on and collects findings."""

    def __init__(self) -> None:
        super().__init__()
        self._resolver = Resolver()
        self._results: dict[tuple[ast.AST, bool, tuple[tuple[str, Value], ...]], Value] = {}
        self._evaluations: collections.Counter[ast.AST] = collections.Counter()
        self._lambdas: dict[ast.Lambda, Definition] = {}
        self._classes: set[ast.AST] = set()
        self._modules: set[str] = set()

    # Classes, functions and modules

    def read_class(self, definition: Definition, entries: Sequence[str]) -> None:
        """Reads a class's construction, its entries, and the classes that it constructs."""
        if definition.node in self._classes:
            return
        self._classes.add(definition.node)
        self._read_module(definition.module)
        initial = self._resolver.method(definition, "__init__")
        if initial is not None:
            self._call(initial, {"self": Value(instance=definition)}, building=True)
        for entry in entries:
            found = self._resolver.method(definition, entry)
            if found is not None and not self._evaluations[found.node]:  # else it was read at its call
                self._call(found, expected_arguments(found, definition))
        for part in constructed_classes(definition, initial):
            self.read_class(part, ("forward", "__call__"))

    def _read_module(self, module: Module) -> None:
        """What an import of it runs. Code in an `if` or a `try` is optional to its author, and left out."""
        if str(module.path) in self._modules:
            return
        self._modules.add(str(module.path))
        skipped = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.If, ast.Try)
        body = [statement for statement in module.tree.body if not isinstance(statement, skipped)]
        self.run_in(Scope(module, {}, dict(module.imports), building=True), body)

    def _call(self, function: Definition, arguments: dict[str, Value], *, building: bool = False) -> Value:
        """The result of a function for these arguments."""
        self._read_module(function.module)
        key = (function.node, building, tuple(sorted(arguments.items(), key=lambda item: item[0])))
        if key in self._results:
            return self._results[key]
        if not building:
            self._evaluations[function.node] += 1
            if self._evaluations[function.node] > EVALUATIONS_MAX:
                return UNKNOWN
        self._results[key] = UNKNOWN  # for a function that calls itself
        scope = Scope(function.module, dict(arguments), dict(function.module.imports), building=building)
        self._results[key] = result = self.run_in(scope, function.node.body)
        return result

    # Expressions

    def visit_Name(self, node: ast.Name) -> Value:
        return self._scope.names.get(node.id, UNKNOWN)

    def visit_Constant(self, node: ast.Constant) -> Value:
        return literal_value(node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> Value:
        value = self.evaluate(node.value)
        self.assign(node.target, value)
        return value

    def visit_Starred(self, node: ast.Starred | ast.Await) -> Value:
        return self.evaluate(node.value)

    visit_Await = visit_Starred

    def visit_Lambda(self, node: ast.Lambda) -> Value:
        if node not in self._lambdas:
            body: list[ast.stmt] = [ast.Return(value=node.body, lineno=node.lineno)]
            function = ast.FunctionDef("<lambda>", node.args, body, decorator_list=[], lineno=node.lineno)
            self._lambdas[node] = Definition(self._scope.module, function)
        return Value(function=self._lambdas[node])

    def visit_Tuple(self, node: ast.Tuple | ast.List | ast.Set) -> Value:
        value = sequence([self.evaluate(item) for item in node.elts])
        is_starred = any(isinstance(item, ast.Starred) for item in node.elts)
        return Value(item=value.item) if is_starred else value

    visit_List = visit_Set = visit_Tuple

    def visit_Dict(self, node: ast.Dict) -> Value:
        values = [self.evaluate(item) for item in node.values]
        keys = [literal_text(key) for key in node.keys]
        entries = tuple((key, value) for key, value in zip(keys, values, strict=True) if key is not None)
        return Value(entries=entries) if len(entries) == len(keys) else UNKNOWN

    def _comprehend(self, generators: list[ast.comprehension], *results: ast.expr) -> list[Value]:
        before = dict(self._scope.names)
        for generator in generators:
            self.assign(generator.target, self.evaluate(generator.iter).iterated)
            for condition in generator.ifs:
                self.decide(condition)
        values = [self.evaluate(result) for result in results]
        self._scope.names = before
        return values

    def visit_ListComp(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp) -> Value:
        return Value(item=self._comprehend(node.generators, node.elt)[0])

    visit_GeneratorExp = visit_SetComp = visit_ListComp

    def visit_DictComp(self, node: ast.DictComp) -> Value:
        self._comprehend(node.generators, node.key, node.value)
        return UNKNOWN

    def visit_JoinedStr(self, node: ast.JoinedStr) -> Value:
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                value = self.evaluate(part.value)
                # Without a format a tensor's own text is there, which a trace has too.
                if value.is_traced and part.format_spec is not None and part.conversion == -1:
                    self.report("tensor-to-number", part)
        return UNKNOWN

    def visit_Attribute(self, node: ast.Attribute) -> Value:
        name = self._scope.global_name(node)
        if name in FLOAT64_DTYPES:
            return Value(is_float64=True)
        if name in COMPLEX_DTYPES:
            return Value(is_complex=True)
        if name in FALSE_ON_TPU or node.attr in FALSE_ATTRIBUTES:
            return known_truth(False)
        owner = self.evaluate(node.value)
        if owner.is_tensor:
            return dataclasses.replace(owner, is_mask=False) if node.attr in TENSOR_ATTRIBUTES else UNKNOWN
        if owner.instance is None:
            return UNKNOWN
        getter = self._resolver.property_getter(owner.instance, node.attr)
        if getter is not None:
            return self._call(getter, {"self": owner}, building=self._scope.building)
        return self._resolver.attribute(owner.instance, node.attr)

    def visit_Subscript(self, node: ast.Subscript) -> Value:
        base, index = self.evaluate(node.value), self.evaluate(node.slice)
        if not base.is_tensor:
            return self._item(node, base, index)
        for part in node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]:
            if isinstance(part, ast.Slice):
                if any(self.evaluate(bound).is_traced for bound in (part.lower, part.upper, part.step)):
                    self.report("tensor-to-number", node, "a slice ends at the value of a tensor, which must be known")
            else:
                chosen = self.evaluate(part)
                if chosen.is_traced and chosen.is_mask:
                    self.report("mask-indexing", node)
        strided = base.is_strided or is_strided(node.slice)
        result = combine(base, index)
        return dataclasses.replace(result, is_mask=base.is_mask, is_strided=strided, made_at=base.made_at)

    def _item(self, node: ast.Subscript, base: Value, index: Value) -> Value:
        """An item of a list or dict."""
        if base.item is None:
            return base.entry(node.slice)
        if index.is_traced:
            self.report("tensor-to-number", node, "a list is indexed by a tensor, whose value must be known")
        if isinstance(node.slice, ast.Slice):
            return Value(item=base.item)
        number = node.slice.value if isinstance(node.slice, ast.Constant) else None
        elements = base.elements or ()
        return elements[number] if isinstance(number, int) and -len(elements) <= number < len(elements) else base.item

    def visit_Compare(self, node: ast.Compare) -> Value:
        values = [self.evaluate(each) for each in (node.left, *node.comparators)]
        operator, other = node.ops[0], node.comparators[0]
        literal = other.value if isinstance(other, ast.Constant) else ...
        if isinstance(operator, (ast.Is, ast.IsNot)):
            is_decided = literal is None and (values[0].is_tensor or values[0].is_none)
            return known_truth(isinstance(operator, ast.Is) == values[0].is_none) if is_decided else UNKNOWN
        if isinstance(operator, (ast.In, ast.NotIn)):
            if values[1].is_traced:
                self.report("tensor-condition", node)
            return UNKNOWN
        if isinstance(operator, (ast.Eq, ast.NotEq)) and literal in OTHER_DEVICES:
            return known_truth(isinstance(operator, ast.NotEq))
        if len(values) == 2 and is_outer_product(node.left, other, are_masks=True):
            self.report("square-mask", node.left)
        result = combine(*values)
        return dataclasses.replace(result, is_mask=result.is_tensor)

    def visit_BoolOp(self, node: ast.BoolOp) -> Value:
        decisive = isinstance(node.op, ast.Or)
        result: Value | None = None
        is_certain = True
        for operand in node.values:
            value = self.evaluate(operand)
            if value.truth is decisive:
                return known_truth(decisive) if is_certain or not decisive else UNKNOWN
            is_certain = is_certain and value.truth is not None
            if value.is_traced and operand is not node.values[-1]:
                self.report("tensor-condition", operand)
                value = UNKNOWN
            result = value if result is None else join(result, value)
        return known_truth(not decisive) if is_certain else result or UNKNOWN

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Value:
        value = self.evaluate(node.operand)
        if not isinstance(node.op, ast.Not):
            return value
        if value.is_traced:
            self.report("tensor-condition", node)
        return known_truth(not value.truth) if value.truth is not None else UNKNOWN

    def visit_BinOp(self, node: ast.BinOp) -> Value:
        left, right = self.evaluate(node.left), self.evaluate(node.right)
        result = combine(left, right)
        if not result.is_tensor and (left.item is not None or right.item is not None):
            return join(left, right)
        is_product = isinstance(node.op, (ast.Mult, ast.BitAnd, ast.BitOr)) and left.is_tensor and right.is_tensor
        if is_product and is_outer_product(node.left, node.right, are_masks=left.is_mask and right.is_mask):
            self.report("square-mask", node.left)
        if result.is_traced and (left.is_complex or right.is_complex):
            self.report("complex", node)
        is_mask = isinstance(node.op, (ast.BitAnd, ast.BitOr, ast.BitXor)) and (left.is_mask or right.is_mask)
        return dataclasses.replace(result, is_mask=is_mask, made_at=left.made_at or right.made_at)

    def visit_IfExp(self, node: ast.IfExp) -> Value:
        truth = self.decide(node.test)
        if truth is not None:
            return self.evaluate(node.body if truth else node.orelse)
        return join(self.evaluate(node.body), self.evaluate(node.orelse))

    # Calls

    def visit_Call(self, node: ast.Call) -> Value:
        arguments = [self.evaluate(argument) for argument in node.args]
        keywords = {keyword.arg or "**": self.evaluate(keyword.value) for keyword in node.keywords}
        call = Call(node, arguments, keywords, building=self._scope.building)
        result = self._called(call)
        for trap, reason in call.traps:
            self.report(trap, node, reason)
        return result

    def _called(self, call: Call) -> Value:
        name = self._scope.global_name(call.node.func)
        if name is not None:
            return self._call_by_name(name, call)
        if isinstance(call.node.func, ast.Attribute):
            owner = self.evaluate(call.node.func.value)
            result = self._call_method(call.node.func, owner, call)
            if result is not None:
                return result
        callee = self.evaluate(call.node.func)
        if callee.function is not None:
            return self._follow(call, callee.function, closure=self._scope.names)
        found = self._resolver.method(callee.instance, "forward", "__call__") if callee.instance is not None else None
        return self._follow(call, found, callee) if found is not None else combine(*call.values)

    def _call_by_name(self, name: str, call: Call) -> Value:
        result = call_global(name, call)
        if result is not None:
            return result
        if name.startswith("torch."):
            return call_torch(name.removeprefix("torch."), call)
        found = self._scope.definition(name)
        if found is None:
            return UNKNOWN  # a builtin, or another library's
        return Value(instance=found) if found.is_class else self._follow(call, found)

    def _call_method(self, func: ast.Attribute, owner: Value, call: Call) -> Value | None:
        """The result of a method of a container, a tensor, a generator or an object; None for any other."""
        name = func.attr
        variable = func.value.id if isinstance(func.value, ast.Name) else None
        if owner.item is not None and name in ("append", "extend", "insert"):
            added = call.arguments[-1] if call.arguments else UNKNOWN
            added = (added.item or UNKNOWN) if name == "extend" else added
            if variable is not None:
                self._scope.names[variable] = Value(item=added if owner.elements == () else join(owner.item, added))
            return UNKNOWN
        if owner.entries is not None:
            if name in ("get", "setdefault") and call.node.args:
                return owner.entry(call.node.args[0])
            if name not in ("keys", "items", "values", "copy") and variable is not None:
                self._scope.names[variable] = UNKNOWN  # update, pop, clear
            return UNKNOWN
        if owner.is_tensor or (name == "cuda" and owner.instance is None and owner.item is None):
            return call_tensor_method(name, owner, call)
        if owner.is_random_generator:
            call.report("python-random")
            return UNKNOWN
        found = self._resolver.method(owner.instance, name) if owner.instance is not None else None
        return self._follow(call, found, owner) if found is not None else None

    def _follow(
        self,
        call: Call,
        function: Definition,
        owner: Value | None = None,
        closure: Mapping[str, Value] | None = None,
    ) -> Value:
        arguments = {**(closure or {}), **self._resolver.bind(call, function, owner)}
        return self._call(function, arguments, building=call.building)
