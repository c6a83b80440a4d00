"""Reading expressions: what each is worth, and what it needs the value of a tensor for."""

from __future__ import annotations

import ast
import dataclasses
import functools

from comfy_tpu.porting.calls import CallReading
from comfy_tpu.porting.source import Definition
from comfy_tpu.porting.torch_calls import is_strided
from comfy_tpu.porting.values import UNKNOWN, Value, computed, constant, joined, known, several
from comfy_tpu.porting.vocabulary import (
    COMPLEX_DTYPES,
    FALSE_ATTRIBUTES,
    FALSE_HERE,
    FLOAT64,
    OTHER_DEVICES,
    TENSOR_ATTRIBUTES,
)


class ExpressionReading(CallReading):
    """The part of reading a function that is about its expressions."""

    def assign(self, target: ast.expr, value: Value) -> None:
        raise NotImplementedError

    def iterated(self, node: ast.expr) -> Value:
        return self.value(node).each

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
        self.assign(node.target, value)
        return value

    def _value_of_Tuple(self, node: ast.Tuple | ast.List) -> Value:  # noqa: N802
        items = [self.value(item.value if isinstance(item, ast.Starred) else item) for item in node.elts]
        if not any(isinstance(item, ast.Starred) for item in node.elts):
            return several(items)
        return Value(items=several(items).items)

    _value_of_List = _value_of_Set = _value_of_Tuple  # noqa: N815

    def _value_of_Dict(self, node: ast.Dict) -> Value:  # noqa: N802
        values = [self.value(item) for item in node.values]
        keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            return UNKNOWN
        return Value(named=tuple(zip(map(str, keys), values, strict=True)))

    def _value_of_ListComp(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp) -> Value:  # noqa: N802
        before = dict(self.names)
        for generator in node.generators:
            self.assign(generator.target, self.iterated(generator.iter))
            for condition in generator.ifs:
                self.decide(condition)
        value = Value(items=self.value(node.elt))
        self.names = before
        return value

    def _value_of_DictComp(self, node: ast.DictComp) -> Value:  # noqa: N802
        for part in (node.key, node.value):
            self._value_of_ListComp(ast.ListComp(elt=part, generators=node.generators))
        return UNKNOWN

    _value_of_GeneratorExp = _value_of_SetComp = _value_of_ListComp  # noqa: N815

    def _value_of_Attribute(self, node: ast.Attribute) -> Value:  # noqa: N802
        name = self.dotted(node)
        if name in FLOAT64:
            return Value(is_float64=True)
        if name in COMPLEX_DTYPES:
            return Value(is_complex=True)
        if name in FALSE_HERE or (node.attr in FALSE_ATTRIBUTES):
            return known(False)
        owner = self.value(node.value)
        if owner.is_tensor:
            return dataclasses.replace(owner, is_mask=False) if node.attr in TENSOR_ATTRIBUTES else UNKNOWN
        return self.attribute_of(node, owner)

    def _value_of_Subscript(self, node: ast.Subscript) -> Value:  # noqa: N802
        base = self.value(node.value)
        index = self.value(node.slice)
        if not base.is_tensor:
            if base.named is not None:
                return base.entry(node.slice)
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
        strided = base.is_strided or is_strided(node.slice)
        return dataclasses.replace(
            computed(base, index), is_mask=base.is_mask, is_strided=strided, made_at=base.made_at
        )

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
            if values[1].is_traced:
                self.report("tensor-condition", node)
            return UNKNOWN
        if (
            isinstance(other, ast.Constant)
            and other.value in OTHER_DEVICES
            and isinstance(operator, (ast.Eq, ast.NotEq))
        ):
            return known(isinstance(operator, ast.NotEq))
        if len(values) == 2:
            self.check_outer_product(node.left, other, is_mask=True)
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
            self.check_outer_product(node.left, node.right, is_mask=left.is_mask and right.is_mask)
        result = computed(left, right)
        if result.is_traced and (left.is_complex or right.is_complex):
            self.report("complex", node)
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
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                value = self.value(part.value)
                # Without a format a tensor's own text is there, which a trace has too.
                if value.is_traced and part.format_spec is not None and part.conversion == -1:
                    self.report("tensor-to-number", part)
        return UNKNOWN

    def _value_of_Lambda(self, node: ast.Lambda) -> Value:  # noqa: N802
        return Value(function=Definition(self.module, _as_function(node)))

    def _value_of_Await(self, node: ast.Await) -> Value:  # noqa: N802
        return self.value(node.value)


@functools.cache
def _as_function(node: ast.Lambda) -> ast.FunctionDef:
    """One for each, so that a reader knows what it has read."""
    body: list[ast.stmt] = [ast.Return(value=node.body, lineno=node.lineno)]
    return ast.FunctionDef(name="<lambda>", args=node.args, body=body, decorator_list=[], lineno=node.lineno)
