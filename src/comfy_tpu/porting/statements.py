"""Control flow of the static reader: names after assignments, branches and loops, and the findings on the way."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from comfy_tpu.porting.resolver import Scope
from comfy_tpu.porting.source import Definition, imported_names
from comfy_tpu.porting.torch_calls import host_write_reason, is_strided
from comfy_tpu.porting.traps import Finding, finding
from comfy_tpu.porting.values import UNKNOWN, Value, combine, join
from comfy_tpu.porting.vocabulary import GPU_LIBRARIES

CONSTRUCTION_TRAPS = frozenset(["cuda", "distributed", "gpu-only-import"])
"""Traps that stop a model's construction too, which runs on the host."""


class StatementVisitor(ast.NodeVisitor):
    """Executes statements on abstract values, in a `Scope`.

    `visit` of an expression returns its `Value`, which is unknown here; `visit` of a statement returns False where
    control does not reach the next statement.
    """

    def __init__(self) -> None:
        self._scope: Scope
        self._findings: dict[tuple[str, str, int], Finding] = {}

    @property
    def findings(self) -> list[Finding]:
        return sorted(self._findings.values(), key=lambda each: (each.file, each.line, each.trap))

    def report(self, trap: str, node: ast.AST, reason: str | None = None) -> None:
        module, line = self._scope.module, getattr(node, "lineno", 0)
        if not self._scope.building or trap in CONSTRUCTION_TRAPS:
            found = finding(trap, str(module.path), line, module.code(line), reason=reason)
            self._findings.setdefault((trap, found.file, line), found)

    def run_in(self, scope: Scope, body: Iterable[ast.stmt]) -> Value:
        """The value that a function's body returns."""
        outer = getattr(self, "_scope", scope)
        self._scope = scope
        try:
            self.run(body)
        finally:
            self._scope = outer
        return scope.returned or UNKNOWN

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
        names = imported_names(node, self._scope.module)
        self._scope.imports.update(names)
        is_relative = bool(getattr(node, "level", 0))
        libraries = {name.split(".")[0] for name in names.values()} & GPU_LIBRARIES
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
        value, before = self.evaluate(node.value), self._scope.returned
        self._scope.returned = value if before is None else join(before, value)
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
        item = self.evaluate(node.iter).iterated
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
