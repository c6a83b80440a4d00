"""Finding traps by reading: a model's methods are followed with what is known of their arguments, and nothing runs.

Every expression is worth a `Value`. What is unknown is nothing to complain about: a trap is one only where a tensor of
the program is certainly in it.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable, Sequence

from comfy_tpu.porting.arguments import expected_arguments
from comfy_tpu.porting.expressions import ExpressionReading
from comfy_tpu.porting.source import Definition, Function, Module, definition_of, imported_names, method
from comfy_tpu.porting.torch_calls import is_strided
from comfy_tpu.porting.traps import Finding, finding
from comfy_tpu.porting.values import UNKNOWN, Place, Value, computed, joined
from comfy_tpu.porting.vocabulary import GPU_LIBRARIES

CONTEXTS_MAX = 12
"""How often one function is read, for different arguments."""


class Reader:
    """Reads a class from its entry on; `findings` are what it met."""

    def __init__(self) -> None:
        self._findings: dict[tuple[str, str, int], Finding] = {}
        self._results: dict[tuple[ast.AST, bool, tuple[tuple[str, Value], ...]], Value] = {}
        self._contexts: dict[ast.AST, int] = {}
        self._classes: set[ast.AST] = set()
        self._modules: set[str] = set()

    @property
    def findings(self) -> list[Finding]:
        return sorted(self._findings.values(), key=lambda each: (each.file, each.line, each.trap))

    def report(self, trap: str, module: Module, node: ast.AST, reason: str | None = None) -> None:
        line = getattr(node, "lineno", 0)
        key = (trap, str(module.path), line)
        self._findings.setdefault(key, finding(trap, str(module.path), line, module.code(line), reason=reason))

    def read_class(self, definition: Definition, entries: Sequence[str]) -> None:
        """Its construction, the entries that it has, and the classes that it is made of."""
        if definition.node in self._classes:
            return
        self._classes.add(definition.node)
        self.read_module(definition.module)
        initial = method(definition, "__init__")
        if initial is not None:
            building = FunctionReading(self, initial, {"self": Value(instance=definition)}, building=True)
            building.run()
        for entry in entries:
            found = method(definition, entry)
            # What was seen to be called has been read with what it was called with.
            if found is not None and (found.node not in self._contexts):
                self.read_function(found, expected_arguments(found, definition))
        for part in _parts(definition, initial):
            self.read_class(part, ("forward", "__call__"))

    def read_function(self, definition: Definition, arguments: dict[str, Value], *, building: bool = False) -> Value:
        """What it returns for these arguments."""
        self.read_module(definition.module)
        key = (definition.node, building, tuple(sorted(arguments.items(), key=lambda item: item[0])))
        if key in self._results:
            return self._results[key]
        if not building:
            count = self._contexts[definition.node] = self._contexts.get(definition.node, 0) + 1
            if count > CONTEXTS_MAX:
                return UNKNOWN
        self._results[key] = UNKNOWN  # for a function that calls itself
        self._results[key] = result = FunctionReading(self, definition, arguments, building=building).run()
        return result

    def read_module(self, module: Module) -> None:
        """What runs when it is imported; what stands in an `if` or a `try` has its author's attention."""
        if str(module.path) in self._modules:
            return
        self._modules.add(str(module.path))
        reading = FunctionReading(self, Definition(module, _as_function(module)), {}, building=True)
        reading.run()


def _compares(pattern: ast.pattern) -> bool:
    """Whether it asks for a value, not only for a class or a name."""
    return any(isinstance(node, ast.MatchValue) for node in ast.walk(pattern))


def _captured(pattern: ast.pattern) -> list[str]:
    captures = (ast.MatchAs, ast.MatchStar)
    return [node.name for node in ast.walk(pattern) if isinstance(node, captures) and node.name is not None]


def _as_function(module: Module) -> ast.FunctionDef:
    skipped = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.If, ast.Try)
    body = [statement for statement in module.tree.body if not isinstance(statement, skipped)]
    arguments = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.FunctionDef(name="<module>", args=arguments, body=body, decorator_list=[], lineno=1)


def _parts(definition: Definition, initial: Definition | None) -> Iterable[Definition]:
    """Classes of the package that a class names where it is built: submodules and attention processors."""
    statements: list[tuple[Module, ast.stmt]] = []
    if initial is not None:
        statements += [(initial.module, statement) for statement in initial.node.body]
    for statement in definition.node.body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            statements.append((definition.module, statement))
    for module, statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                found = definition_of(node.id, module, module.imports)
                if found is not None and found.is_class:
                    yield found


class FunctionReading(ExpressionReading):
    """One reading of one function's statements, with what its names are worth at each."""

    def __init__(
        self, reader: Reader, definition: Definition, arguments: dict[str, Value], *, building: bool = False
    ) -> None:
        self.reader = reader
        self.module = definition.module
        assert not isinstance(definition.node, ast.ClassDef)
        self.node: Function = definition.node
        self.names = dict(arguments)
        self.imports = dict(definition.module.imports)
        self.building = building
        """Construction runs on the host, before any program: only what cannot run at all is a trap there."""
        self.returned: Value | None = None
        self._guarded = 0
        """How many of `try` and undecided `if` are around: who imports there has thought of the library's absence."""

    def report(self, trap: str, node: ast.AST, reason: str | None = None) -> None:
        if self.building and trap not in ("cuda", "distributed", "gpu-only-import"):
            return
        self.reader.report(trap, self.module, node, reason)

    def run(self) -> Value:
        self._run(self.node.body)
        return self.returned or UNKNOWN

    def _run(self, body: Iterable[ast.stmt]) -> bool:
        """Whether the end of the statements is reached."""
        return all(self._statement(statement) for statement in body)

    def _statement(self, node: ast.stmt) -> bool:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self.names[node.name] = Value(function=Definition(self.module, node))
            return True
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            self._import(node)
        elif isinstance(node, ast.Assign):
            value = self.value(node.value)
            for target in node.targets:
                self.assign(target, value)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self.assign(node.target, self.value(node.value))
        elif isinstance(node, ast.AugAssign):
            self._augment(node)
        elif isinstance(node, ast.Return):
            value = self.value(node.value) if node.value is not None else UNKNOWN
            self.returned = value if self.returned is None else joined(self.returned, value)
            return False
        elif isinstance(node, ast.If):
            return self._if(node)
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            self._for(node)
        elif isinstance(node, ast.While):
            self.decide(node.test)
            self._run(node.body)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                self.value(item.context_expr)
            return self._run(node.body)
        elif isinstance(node, ast.Try):
            return self._try(node)
        elif isinstance(node, ast.Match):
            return self._match(node)
        elif isinstance(node, ast.Assert):
            if self.value(node.test).is_traced:
                self.report("tensor-assert", node)
        elif isinstance(node, (ast.Raise, ast.Continue, ast.Break)):
            return False
        elif isinstance(node, ast.Expr):
            self.value(node.value)
        return True

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        names = imported_names(node, self.module)
        self.imports.update(names)
        level = getattr(node, "level", 0)
        roots = {name.split(".")[0] for name in names.values()} if not level else set()
        if self._guarded == 0 and roots & GPU_LIBRARIES:
            library = sorted(roots & GPU_LIBRARIES)[0]
            self.report(
                "gpu-only-import", node, f"{library} is imported, a library of GPU kernels that a TPU machine lacks"
            )

    def _if(self, node: ast.If) -> bool:
        truth = self.decide(node.test)
        if truth is not None:
            return self._run(node.body if truth else node.orelse)
        before = dict(self.names)
        self._guarded += 1
        through = self._run(node.body)
        after, self.names = self.names, before
        through_else = self._run(node.orelse)
        self._guarded -= 1
        if not through_else:
            self.names = after
        elif through:
            self._join(after)
        return through or through_else

    def _join(self, names: dict[str, Value]) -> None:
        for name, value in names.items():
            self.names[name] = joined(self.names[name], value) if name in self.names else value

    def _for(self, node: ast.For | ast.AsyncFor) -> None:
        items = self.iterated(node.iter)
        for _ in range(2):  # what the end of the body makes of a name is what its beginning sees
            before = dict(self.names)
            self.assign(node.target, items)
            self._run(node.body)
            self._join(before)
        self._run(node.orelse)

    def _match(self, node: ast.Match) -> bool:
        """Every case, from the same names; what a pattern captures is unknown."""
        if self.value(node.subject).is_traced and any(_compares(case.pattern) for case in node.cases):
            self.report("tensor-condition", node.subject)
        before, self._guarded = dict(self.names), self._guarded + 1
        ends = []
        for case in node.cases:
            self.names = before | dict.fromkeys(_captured(case.pattern), UNKNOWN)
            if case.guard is not None:
                self.decide(case.guard)
            if self._run(case.body):
                ends.append(self.names)
        self._guarded -= 1
        last = node.cases[-1]
        if last.guard is not None or not isinstance(last.pattern, ast.MatchAs) or last.pattern.pattern is not None:
            ends.append(before)  # no case may fit
        if not ends:
            return False
        self.names = ends[0]
        for names in ends[1:]:
            self._join(names)
        return True

    def _try(self, node: ast.Try) -> bool:
        self._guarded += 1
        through = self._run(node.body)
        self._guarded -= 1
        after = dict(self.names)
        recovered = False
        for handler in node.handlers:
            self.names = dict(after)
            recovered = self._run(handler.body) or recovered
        self.names = after
        through = through and self._run(node.orelse)
        return self._run(node.finalbody) and (through or recovered)

    def assign(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            each = value.items or (value if value.is_tensor else UNKNOWN)
            starred = any(isinstance(item, ast.Starred) for item in target.elts)
            matching = value.parts is not None and len(value.parts) == len(target.elts) and not starred
            parts = value.parts if matching and value.parts is not None else (each,) * len(target.elts)
            for item, part in zip(target.elts, parts, strict=True):
                self.assign(item.value if isinstance(item, ast.Starred) else item, part)
        elif isinstance(target, ast.Subscript):
            self._write(target, value)
        elif isinstance(target, ast.Attribute):
            self.value(target.value)

    def _augment(self, node: ast.AugAssign) -> None:
        value = self.value(node.value)
        before = self.value(node.target)
        if isinstance(node.target, ast.Subscript):
            self._write(node.target, value)
            return
        if before.place is Place.HOST and value.is_traced:
            self.host_written(node, before)
        elif before.is_traced and before.is_strided:
            self.report("strided-write", node)
        if isinstance(node.target, ast.Name):
            result = dataclasses.replace(computed(before, value), is_strided=before.is_strided)
            self.names[node.target.id] = result if result.is_tensor else before

    def _write(self, target: ast.Subscript, value: Value) -> None:
        base = self.value(target.value)
        self.value(target.slice)
        if base.place is Place.HOST and value.holds_traced():
            self.host_written(target, base)
        elif base.is_traced and (base.is_strided or is_strided(target.slice)):
            self.report("strided-write", target)
        elif base.named is not None and isinstance(target.value, ast.Name):
            self.names[target.value.id] = base.with_entry(target.slice, value)

    def host_written(self, node: ast.AST, value: Value) -> None:
        self.report(
            "host-tensor-written",
            node,
            f"a tensor made on the host, for want of a device (line {value.made_at}), is written with values of the "
            "program",
        )
