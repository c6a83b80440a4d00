"""Finding traps by reading: a model's methods are followed with what is known of their arguments, and nothing runs.

Every expression is worth a `Value`. What is unknown is nothing to complain about: a trap is one only where a tensor of
the program is certainly in it.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterable, Sequence

from comfy_tpu.porting.calls import CallReading
from comfy_tpu.porting.source import Definition, Function, Module, definition_of, imported_names, method
from comfy_tpu.porting.traps import Finding, finding
from comfy_tpu.porting.values import (
    SEVERAL_TRACED,
    TRACED,
    UNKNOWN,
    Place,
    Value,
    computed,
    constant,
    joined,
    known,
    several,
)
from comfy_tpu.porting.vocabulary import (
    FALSE_ATTRIBUTES,
    FALSE_HERE,
    FLOAT64,
    GPU_LIBRARIES,
    OTHER_DEVICES,
    TENSOR_ATTRIBUTES,
)

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


def expected_arguments(definition: Definition, owner: Definition | None) -> dict[str, Value]:
    """Of a function that nobody was seen to call: from annotations, defaults and names."""
    assert not isinstance(definition.node, ast.ClassDef)
    arguments = definition.node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    values = {}
    for argument, default in [
        *zip(positional, defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]:
        values[argument.arg] = _expected(argument, default)
    if owner is not None and positional:
        values[positional[0].arg] = Value(instance=owner)
    return values


def _expected(argument: ast.arg, default: ast.expr | None) -> Value:
    if argument.annotation is not None:
        text = ast.unparse(argument.annotation).strip("'\"")
        if "Tensor" not in text:
            return UNKNOWN
        if any(word in text for word in ("list[", "tuple[", "List[", "Tuple[")):
            return SEVERAL_TRACED
        if any(word in text for word in ("dict", "Dict")):
            return UNKNOWN
        return dataclasses.replace(TRACED, is_mask="mask" in argument.arg)
    if default is None and not _NUMBERS.search(argument.arg):
        return dataclasses.replace(TRACED, is_mask="mask" in argument.arg)
    return UNKNOWN


_NUMBERS = re.compile(
    r"^(num|n|is|use|max|min)_|_?(size|sizes|dim|dims|dtype|device|height|width|shape|length|config|cfg|partition)$"
)
"""Names of arguments that are hardly tensors, where nothing says what they are."""


class FunctionReading(CallReading):
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
                self._assign(target, value)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self._assign(node.target, self.value(node.value))
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
            self._assign(node.target, items)
            self._run(node.body)
            self._join(before)
        self._run(node.orelse)

    def iterated(self, node: ast.expr) -> Value:
        value = self.value(node)
        if value.items is not None:
            return value.items
        return dataclasses.replace(value, truth=None) if value.is_tensor else UNKNOWN

    def _try(self, node: ast.Try) -> bool:
        self._guarded += 1
        through = self._run(node.body)
        self._guarded -= 1
        after = dict(self.names)
        for handler in node.handlers:
            self._run(handler.body)
        self.names = after
        return through and self._run(node.orelse) and self._run(node.finalbody)

    def _assign(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            each = value.items or (value if value.is_tensor else UNKNOWN)
            starred = any(isinstance(item, ast.Starred) for item in target.elts)
            matching = value.parts is not None and len(value.parts) == len(target.elts) and not starred
            parts = value.parts if matching and value.parts is not None else (each,) * len(target.elts)
            for item, part in zip(target.elts, parts, strict=True):
                self._assign(item.value if isinstance(item, ast.Starred) else item, part)
        elif isinstance(target, ast.Subscript):
            self._write(target, value)
        elif isinstance(target, ast.Attribute):
            self.value(target.value)

    def _augment(self, node: ast.AugAssign) -> None:
        value = self.value(node.value)
        if isinstance(node.target, ast.Subscript):
            self._write(node.target, value)
            return
        before = self.value(node.target)
        if before.place is Place.HOST and value.is_traced:
            self.host_written(node, before)
        if isinstance(node.target, ast.Name):
            self.names[node.target.id] = computed(before, value) if before.is_tensor or value.is_tensor else before

    def _write(self, target: ast.Subscript, value: Value) -> None:
        base = self.value(target.value)
        self.value(target.slice)
        if base.place is Place.HOST and value.holds_traced():
            self.host_written(target, base)
        elif base.is_traced and is_strided(target.slice):
            self.report("strided-write", target)

    def host_written(self, node: ast.AST, value: Value) -> None:
        self.report(
            "host-tensor-written",
            node,
            f"a tensor made on the host, for want of a device (line {value.made_at}), is written with values of the "
            "program",
        )

    def decide(self, node: ast.expr) -> bool | None:
        """Whether a condition holds, if that is known; a trap if it needs the value of a tensor."""
        value = self.value(node)
        if value.is_traced:
            self.report("tensor-condition", node)
        return value.truth

    def value(self, node: ast.expr | None) -> Value:
        if node is None:
            return UNKNOWN
        reading = getattr(self, f"_value_of_{type(node).__name__}", None)
        return reading(node) if reading is not None else UNKNOWN

    def _value_of_Name(self, node: ast.Name) -> Value:  # noqa: N802
        return self.names.get(node.id, UNKNOWN)

    def _value_of_Constant(self, node: ast.Constant) -> Value:  # noqa: N802
        return constant(node.value)

    def _value_of_NamedExpr(self, node: ast.NamedExpr) -> Value:  # noqa: N802
        value = self.value(node.value)
        self._assign(node.target, value)
        return value

    def _value_of_Tuple(self, node: ast.Tuple | ast.List) -> Value:  # noqa: N802
        items = [self.value(item.value if isinstance(item, ast.Starred) else item) for item in node.elts]
        if not any(isinstance(item, ast.Starred) for item in node.elts):
            return several(items)
        return Value(items=several(items).items)

    _value_of_List = _value_of_Set = _value_of_Tuple  # noqa: N815

    def _value_of_Dict(self, node: ast.Dict) -> Value:  # noqa: N802
        for item in node.values:
            self.value(item)
        return UNKNOWN

    def _value_of_ListComp(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp) -> Value:  # noqa: N802
        before = dict(self.names)
        for generator in node.generators:
            self._assign(generator.target, self.iterated(generator.iter))
            for condition in generator.ifs:
                self.decide(condition)
        value = Value(items=self.value(node.elt))
        self.names = before
        return value

    _value_of_GeneratorExp = _value_of_SetComp = _value_of_ListComp  # noqa: N815

    def _value_of_Attribute(self, node: ast.Attribute) -> Value:  # noqa: N802
        name = self.dotted(node)
        if name in FLOAT64:
            return Value(is_float64=True)
        if name in FALSE_HERE or (node.attr in FALSE_ATTRIBUTES):
            return known(False)
        owner = self.value(node.value)
        if owner.is_tensor:
            return dataclasses.replace(owner, is_mask=False) if node.attr in TENSOR_ATTRIBUTES else UNKNOWN
        return self.attribute_of(owner, node.attr)

    def _value_of_Subscript(self, node: ast.Subscript) -> Value:  # noqa: N802
        base = self.value(node.value)
        index = self.value(node.slice)
        if not base.is_tensor:
            if base.items is not None:
                if index.is_traced:
                    self.report("tensor-to-number", node, "a list is indexed by a tensor, whose value must be known")
                if isinstance(node.slice, ast.Slice):
                    return Value(items=base.items)
                number = node.slice.value if isinstance(node.slice, ast.Constant) else None
                if base.parts is not None and isinstance(number, int) and -len(base.parts) <= number < len(base.parts):
                    return base.parts[number]
                return base.items
            return UNKNOWN
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for part in parts:
            if isinstance(part, ast.Slice):
                if any(self.value(bound).is_traced for bound in (part.lower, part.upper, part.step)):
                    self.report("tensor-to-number", node, "a slice ends at the value of a tensor, which must be known")
                continue
            chosen = self.value(part)
            if chosen.is_traced and chosen.is_mask:
                self.report("mask-indexing", node)
        return dataclasses.replace(computed(base, index), is_mask=base.is_mask, made_at=base.made_at)

    def _value_of_Slice(self, node: ast.Slice) -> Value:  # noqa: N802
        return UNKNOWN

    def _value_of_Compare(self, node: ast.Compare) -> Value:  # noqa: N802
        values = [self.value(node.left), *(self.value(each) for each in node.comparators)]
        operator, other = node.ops[0], node.comparators[0]
        if isinstance(operator, (ast.Is, ast.IsNot)):
            if isinstance(other, ast.Constant) and other.value is None and (values[0].is_tensor or values[0].is_none):
                return known(isinstance(operator, ast.Is) == values[0].is_none)
            return UNKNOWN
        if isinstance(operator, (ast.In, ast.NotIn)):
            return UNKNOWN
        if (
            isinstance(other, ast.Constant)
            and other.value in OTHER_DEVICES
            and isinstance(operator, (ast.Eq, ast.NotEq))
        ):
            return known(isinstance(operator, ast.NotEq))
        result = computed(*values)
        return dataclasses.replace(result, is_mask=True) if result.is_tensor else UNKNOWN

    def _value_of_BoolOp(self, node: ast.BoolOp) -> Value:  # noqa: N802
        decisive = isinstance(node.op, ast.Or)
        result: Value | None = None
        certain = True
        for index, operand in enumerate(node.values):
            value = self.value(operand)
            if value.truth is decisive:
                return known(decisive) if certain or not decisive else UNKNOWN
            certain = certain and value.truth is not None
            if value.is_traced and index < len(node.values) - 1:
                self.report("tensor-condition", operand)
                value = UNKNOWN
            result = value if result is None else joined(result, value)
        return known(not decisive) if certain else result or UNKNOWN

    def _value_of_UnaryOp(self, node: ast.UnaryOp) -> Value:  # noqa: N802
        value = self.value(node.operand)
        if isinstance(node.op, ast.Not):
            if value.is_traced:
                self.report("tensor-condition", node)
            return known(not value.truth) if value.truth is not None else UNKNOWN
        return value

    def _value_of_BinOp(self, node: ast.BinOp) -> Value:  # noqa: N802
        left, right = self.value(node.left), self.value(node.right)
        if (left.items is not None or right.items is not None) and not (left.is_tensor or right.is_tensor):
            return joined(left, right)
        if isinstance(node.op, (ast.Mult, ast.BitAnd, ast.BitOr)) and left.is_tensor and right.is_tensor:
            self.check_outer_product(node)
        result = computed(left, right)
        is_mask = isinstance(node.op, (ast.BitAnd, ast.BitOr, ast.BitXor)) and (left.is_mask or right.is_mask)
        return dataclasses.replace(result, is_mask=is_mask, made_at=left.made_at or right.made_at)

    def _value_of_IfExp(self, node: ast.IfExp) -> Value:  # noqa: N802
        truth = self.decide(node.test)
        if truth is not None:
            return self.value(node.body if truth else node.orelse)
        return joined(self.value(node.body), self.value(node.orelse))

    def _value_of_Starred(self, node: ast.Starred) -> Value:  # noqa: N802
        return self.value(node.value)

    def _value_of_JoinedStr(self, node: ast.JoinedStr) -> Value:  # noqa: N802
        return UNKNOWN

    def _value_of_Await(self, node: ast.Await) -> Value:  # noqa: N802
        return self.value(node.value)


def is_strided(index: ast.expr) -> bool:
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    return any(
        isinstance(part, ast.Slice)
        and part.step is not None
        and not (isinstance(part.step, ast.Constant) and part.step.value in (None, 1))
        for part in parts
    )
