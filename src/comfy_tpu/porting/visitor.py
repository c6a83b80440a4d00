"""The static reader: one visitor that evaluates a model's methods on abstract values, and runs nothing of them.

Every expression has a `Value`. The unknown is never reported: a trap is one only where a tensor of the program is
certainly in it.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

from comfy_tpu.porting import vocabulary
from comfy_tpu.porting.calls import (
    Call,
    call_global,
    call_tensor_method,
    host_write_reason,
    is_outer_product,
    is_strided,
)
from comfy_tpu.porting.resolver import (
    Scope,
    attribute_values,
    bind_arguments,
    constructed_classes,
    expected_arguments,
)
from comfy_tpu.porting.source import Definition, Module
from comfy_tpu.porting.traps import Finding, find_trap
from comfy_tpu.porting.values import UNKNOWN, Value, combine, join, known_truth, literal_text, literal_value, sequence

EVALUATIONS_MAX = 12
"""How often one function is evaluated, for different arguments."""
CONSTRUCTION_TRAPS = frozenset(["cuda", "distributed", "gpu-only-import"])
"""Traps that stop a model's construction too, which runs on the host."""


class SourceVisitor(ast.NodeVisitor):
    """Evaluates a class from its entry points on, in a `Scope`, and collects findings.

    `visit` of an expression returns its `Value`; `visit` of a statement returns False where control does not reach the
    next statement.
    """

    def __init__(self) -> None:
        self._scope: Scope
        self._findings: dict[tuple[str, str, int], Finding] = {}
        self._attributes = functools.cache(attribute_values)
        self._results: dict[tuple[ast.AST, bool, tuple[tuple[str, Value], ...]], Value] = {}
        self._evaluations: collections.Counter[ast.AST] = collections.Counter()
        self._lambdas: dict[ast.Lambda, Definition] = {}
        self._classes: set[ast.AST] = set()
        self._modules: set[str] = set()

    @property
    def findings(self) -> list[Finding]:
        return sorted(self._findings.values(), key=lambda each: (each.file, each.line, each.trap))

    def report(self, trap: str, node: ast.AST, reason: str | None = None) -> None:
        if not self._scope.is_construction or trap in CONSTRUCTION_TRAPS:
            place = (str(self._scope.module.path), getattr(node, "lineno", 0))
            self._findings.setdefault((trap, *place), find_trap(trap, place, reason))

    # Classes, functions and modules

    def read_class(self, definition: Definition, entries: Sequence[str]) -> None:
        """Reads a class's construction, its entries, and the classes that it constructs."""
        if definition.node in self._classes:
            return
        self._classes.add(definition.node)
        self._read_module(definition.module)
        initial = definition.methods.get("__init__")
        if initial is not None:
            self._call(initial, {"self": Value(instance=definition)}, is_construction=True)
        for entry in entries:
            found = definition.methods.get(entry)
            if found is not None and not self._evaluations[found.node]:  # else it was read at its call
                self._call(found, expected_arguments(found, definition))
        for part in constructed_classes(definition):
            self.read_class(part, ("forward", "__call__"))

    def _read_module(self, module: Module) -> None:
        """Reads the code that an import runs, without an `if` or a `try`, which is optional to the module's author."""
        if str(module.path) in self._modules:
            return
        self._modules.add(str(module.path))
        skipped = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.If, ast.Try)
        body = [statement for statement in module.tree.body if not isinstance(statement, skipped)]
        self.run_in(Scope(module, {}, dict(module.imports), is_construction=True), body)

    def _call(self, function: Definition, arguments: dict[str, Value], *, is_construction: bool = False) -> Value:
        """The result of a function for these arguments."""
        self._read_module(function.module)
        key = (function.node, is_construction, tuple(sorted(arguments.items(), key=lambda item: item[0])))
        if key in self._results:
            return self._results[key]
        if not is_construction:
            self._evaluations[function.node] += 1
            if self._evaluations[function.node] > EVALUATIONS_MAX:
                return UNKNOWN
        self._results[key] = UNKNOWN  # for a function that calls itself
        scope = Scope(function.module, dict(arguments), dict(function.module.imports), is_construction=is_construction)
        self._results[key] = result = self.run_in(scope, function.node.body)
        return result

    # Statements

    def run_in(self, scope: Scope, body: Iterable[ast.stmt]) -> Value:
        """The value that a function's body returns."""
        outer = getattr(self, "_scope", scope)
        self._scope = scope
        try:
            self.run(body)
        finally:
            self._scope = outer
        return scope.result or UNKNOWN

    def run(self, body: Iterable[ast.stmt]) -> bool:
        """Whether control reaches the end of the statements."""
        return all(self.visit(statement) is not False for statement in body)

    def generic_visit(self, node: ast.AST) -> Value | None:
        super().generic_visit(node)
        return UNKNOWN if isinstance(node, ast.expr) else None

    def evaluate(self, node: ast.expr | None) -> Value:
        value: Value = UNKNOWN if node is None else self.visit(node)
        return value

    def decide(self, node: ast.expr) -> bool | None:
        """The truth of a condition, None if unknown; a trap if it needs the value of a tensor."""
        value = self.evaluate(node)
        if value.is_traced:
            self.report("tensor-condition", node)
        return value.truth

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._scope.names[node.name] = Value(function=Definition(self._scope.module, node))

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        pass

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        names = self._scope.module.imported_names(node)
        self._scope.imports.update(names)
        is_relative = bool(getattr(node, "level", 0))
        libraries = {name.split(".")[0] for name in names.values()} & vocabulary.GPU_LIBRARIES
        if libraries and not is_relative and not self._scope.guards:
            reason = f"{min(libraries)} is imported, a library of GPU kernels that a TPU machine lacks"
            self.report("gpu-only-import", node, reason)

    visit_ImportFrom = visit_Import

    def visit_Assign(self, node: ast.Assign) -> None:
        value = self.evaluate(node.value)
        for target in node.targets:
            self.assign(target, value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(node.target, self.evaluate(node.value))

    def assign(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            self._scope.names[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            elements = value.elements
            is_starred = any(isinstance(item, ast.Starred) for item in target.elts)
            if elements is None or len(elements) != len(target.elts) or is_starred:
                elements = (value.item or (value if value.is_tensor else UNKNOWN),) * len(target.elts)
            for item, element in zip(target.elts, elements, strict=True):
                self.assign(item.value if isinstance(item, ast.Starred) else item, element)
        elif isinstance(target, ast.Subscript):
            self._write(target, value)
        elif isinstance(target, ast.Attribute):
            self.evaluate(target.value)

    def _write(self, target: ast.Subscript, value: Value) -> None:
        base = self.evaluate(target.value)
        self.evaluate(target.slice)
        if base.is_host and value.contains_traced:
            self.report("host-tensor-written", target, host_write_reason(base))
        elif base.is_traced and (base.is_strided or is_strided(target.slice)):
            self.report("strided-write", target)
        elif base.entries is not None and isinstance(target.value, ast.Name):
            self._scope.names[target.value.id] = base.with_entry(target.slice, value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        value = self.evaluate(node.value)
        before = self.evaluate(node.target)
        if isinstance(node.target, ast.Subscript):
            self._write(node.target, value)
            return
        if before.is_host and value.is_traced:
            self.report("host-tensor-written", node, host_write_reason(before))
        elif before.is_traced and before.is_strided:
            self.report("strided-write", node)
        result = combine(before, value)
        if isinstance(node.target, ast.Name) and result.is_tensor:
            self._scope.names[node.target.id] = dataclasses.replace(result, is_strided=before.is_strided)

    def visit_Return(self, node: ast.Return) -> bool:
        value, before = self.evaluate(node.value), self._scope.result
        self._scope.result = value if before is None else join(before, value)
        return False

    def visit_Raise(self, node: ast.Raise | ast.Continue | ast.Break) -> bool:
        return False

    visit_Continue = visit_Break = visit_Raise

    def visit_Assert(self, node: ast.Assert) -> None:
        if self.evaluate(node.test).is_traced:
            self.report("tensor-assert", node)

    def visit_If(self, node: ast.If) -> bool:
        truth = self.decide(node.test)
        if truth is not None:
            return self.run(node.body if truth else node.orelse)
        names = self._scope.names
        return self._run_one_of([(names, node.body), (names, node.orelse)])

    def visit_Match(self, node: ast.Match) -> bool:
        """Every case, from the same names; what a pattern captures is unknown."""
        patterns = [part for case in node.cases for part in ast.walk(case.pattern)]
        if self.evaluate(node.subject).is_traced and any(isinstance(part, ast.MatchValue) for part in patterns):
            self.report("tensor-condition", node.subject)
        names, branches = self._scope.names, []
        for case in node.cases:
            captures = [part for part in ast.walk(case.pattern) if isinstance(part, (ast.MatchAs, ast.MatchStar))]
            captured = {capture.name: UNKNOWN for capture in captures if capture.name is not None}
            guard: list[ast.stmt] = []
            if case.guard is not None:
                guard = [ast.If(test=case.guard, body=[ast.Pass()], orelse=[])]
            branches.append((names | captured, [*guard, *case.body]))
        last = node.cases[-1]
        if last.guard is not None or not isinstance(last.pattern, ast.MatchAs) or last.pattern.pattern is not None:
            branches.append((names, []))  # no case may fit
        return self._run_one_of(branches)

    def _run_one_of(self, branches: Sequence[tuple[Mapping[str, Value], Sequence[ast.stmt]]]) -> bool:
        ends = []
        self._scope.guards += 1
        for names, body in branches:
            self._scope.names = dict(names)
            if self.run(body):
                ends.append(self._scope.names)
        self._scope.guards -= 1
        if not ends:
            return False
        self._scope.names = ends[-1]
        for names in ends[:-1]:
            self._join_names(names)
        return True

    def _join_names(self, others: Mapping[str, Value]) -> None:
        names = self._scope.names
        for name, value in others.items():
            names[name] = join(names[name], value) if name in names else value

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        item = self.evaluate(node.iter).loop_variable
        for _ in range(2):  # the names at the end of the body are those at its next beginning
            before = dict(self._scope.names)
            self.assign(node.target, item)
            self.run(node.body)
            self._join_names(before)
        self.run(node.orelse)

    visit_AsyncFor = visit_For

    def visit_While(self, node: ast.While) -> None:
        self.decide(node.test)
        self.run(node.body)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> bool:
        for item in node.items:
            self.evaluate(item.context_expr)
        return self.run(node.body)

    visit_AsyncWith = visit_With

    def visit_Try(self, node: ast.Try) -> bool:
        self._scope.guards += 1
        is_through = self.run(node.body)
        self._scope.guards -= 1
        after = self._scope.names
        is_recovered = False
        for handler in node.handlers:
            self._scope.names = dict(after)
            is_recovered = self.run(handler.body) or is_recovered
        self._scope.names = after
        is_through = is_through and self.run(node.orelse)
        return self.run(node.finalbody) and (is_through or is_recovered)

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
            self.assign(generator.target, self.evaluate(generator.iter).loop_variable)
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
        if name in vocabulary.FLOAT64_DTYPES:
            return Value(is_float64=True)
        if name in vocabulary.COMPLEX_DTYPES:
            return Value(is_complex=True)
        if name in vocabulary.FALSE_ON_TPU or node.attr in vocabulary.FALSE_ATTRIBUTES:
            return known_truth(False)
        owner = self.evaluate(node.value)
        if owner.is_tensor:
            return dataclasses.replace(owner, is_mask=False) if node.attr in vocabulary.TENSOR_ATTRIBUTES else UNKNOWN
        if owner.instance is None:
            return UNKNOWN
        getter = owner.instance.methods.get(node.attr)
        if getter is not None and {name.split(".")[-1] for name in getter.decorators} & vocabulary.PROPERTY_DECORATORS:
            return self._call(getter, {"self": owner}, is_construction=self._scope.is_construction)
        return self._attributes(owner.instance).get(node.attr, UNKNOWN)

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
        return dataclasses.replace(result, is_mask=base.is_mask, is_strided=strided, origin_line=base.origin_line)

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
        if isinstance(operator, (ast.Eq, ast.NotEq)) and literal in vocabulary.OTHER_DEVICES:
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
        return dataclasses.replace(result, is_mask=is_mask, origin_line=left.origin_line or right.origin_line)

    def visit_IfExp(self, node: ast.IfExp) -> Value:
        truth = self.decide(node.test)
        if truth is not None:
            return self.evaluate(node.body if truth else node.orelse)
        return join(self.evaluate(node.body), self.evaluate(node.orelse))

    # Calls

    def visit_Call(self, node: ast.Call) -> Value:
        arguments = [self.evaluate(argument) for argument in node.args]
        keywords = {keyword.arg or "**": self.evaluate(keyword.value) for keyword in node.keywords}
        call = Call(node, arguments, keywords, is_construction=self._scope.is_construction)
        result = self._call_result(call)
        for trap, reason in call.traps:
            self.report(trap, node, reason)
        return result

    def _call_result(self, call: Call) -> Value:
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
        methods = callee.instance.methods if callee.instance is not None else {}
        found = methods.get("forward") or methods.get("__call__")
        return self._follow(call, found, callee) if found is not None else combine(*call.values)

    def _call_by_name(self, name: str, call: Call) -> Value:
        result = call_global(name, call)
        if result is not None:
            return result
        found = self._scope.module.resolve(name, self._scope.imports)
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
        found = owner.instance.methods.get(name) if owner.instance is not None else None
        return self._follow(call, found, owner) if found is not None else None

    def _follow(
        self,
        call: Call,
        function: Definition,
        owner: Value | None = None,
        closure: Mapping[str, Value] | None = None,
    ) -> Value:
        arguments = {**(closure or {}), **bind_arguments(call, function, owner)}
        return self._call(function, arguments, is_construction=call.is_construction)
