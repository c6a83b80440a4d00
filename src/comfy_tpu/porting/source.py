"""A model's source: modules of one package, parsed and never imported, and the definitions that names refer to."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path

from comfy_tpu.errors import InvalidValueError

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass(frozen=True, eq=False)
class Definition:
    """A class or function with its module."""

    module: Module
    node: ast.ClassDef | Function

    @property
    def is_class(self) -> bool:
        return isinstance(self.node, ast.ClassDef)


class Module:
    def __init__(self, package: Package, path: Path, name: str) -> None:
        self.package = package
        self.path = path
        self.name = name
        content = path.read_bytes()
        try:
            self.tree = ast.parse(content, str(path))
        except SyntaxError as error:
            raise InvalidValueError(
                f"{path}:{error.lineno or 1} is not Python ({error.msg}); correct the line and try again"
            ) from None
        except ValueError as error:
            raise InvalidValueError(f"{path} is not Python ({error}); give a text file") from None
        self.lines = content.decode(errors="replace").splitlines()
        self.definitions: dict[str, Definition] = {}
        self.imports: dict[str, str] = {}
        """Dotted names by local name: {"F": "torch.nn.functional"}."""
        self.stars: list[str] = []
        """Modules of `from module import *`."""
        for statement in _top_level(self.tree.body):
            if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                self.definitions.setdefault(statement.name, Definition(self, statement))
            else:
                names = imported_names(statement, self)
                star = names.pop("*", None)
                self.stars += [star.removesuffix(".*")] if star is not None else []
                self.imports.update(names)

    def code(self, line: int) -> str:
        return self.lines[line - 1].strip() if 0 < line <= len(self.lines) else ""

    def parent(self, level: int) -> str:
        parts = self.name.split(".")
        if self.path.name == "__init__.py":
            parts.append("")
        return ".".join(parts[:-level])


def _top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, and those in an `if` or a `try`, where a library may be missing."""
    for statement in body:
        yield statement
        if isinstance(statement, (ast.If, ast.Try)):
            yield from _top_level(statement.body)
            yield from _top_level(statement.orelse)
            for handler in getattr(statement, "handlers", ()):
                yield from _top_level(handler.body)


def imported_names(statement: ast.stmt, module: Module) -> dict[str, str]:
    if isinstance(statement, ast.Import):
        return {
            alias.asname or alias.name.split(".")[0]: alias.name if alias.asname else alias.name.split(".")[0]
            for alias in statement.names
        }
    if isinstance(statement, ast.ImportFrom):
        origin = statement.module or ""
        if statement.level:
            parent = module.parent(statement.level)
            origin = f"{parent}.{origin}".strip(".")
        return {alias.asname or alias.name: f"{origin}.{alias.name}".strip(".") for alias in statement.names}
    return {}


class Package:
    """The modules under `root`, called `name.…`; without a name, every file there is a module of its own."""

    def __init__(self, root: Path, name: str = "") -> None:
        self.root = root
        self.name = name
        self._modules: dict[Path, Module] = {}

    def module(self, path: Path) -> Module:
        if path not in self._modules:
            relative = path.relative_to(self.root).with_suffix("")
            parts = [part for part in relative.parts if part != "__init__"]
            self._modules[path] = Module(self, path, ".".join([self.name, *parts] if self.name else parts))
        return self._modules[path]

    def find(self, dotted: str) -> Definition | Module | None:
        """The module or definition called `package.module.Name`; None for another package's."""
        parts = dotted.split(".")
        if self.name:
            if parts[0] != self.name:
                return None
            parts = parts[1:]
        path = self.root
        while parts and (path / parts[0]).is_dir():
            path /= parts.pop(0)
        is_file = bool(parts) and (path / f"{parts[0]}.py").is_file()
        file = path / (f"{parts.pop(0)}.py" if is_file else "__init__.py")
        return self._within(self.module(file), parts) if file.is_file() else None

    def _within(self, module: Module, names: list[str]) -> Definition | Module | None:
        if not names:
            return module
        if names[0] in module.definitions:
            return module.definitions[names[0]] if len(names) == 1 else None
        imported = module.imports.get(names[0])
        if imported is not None and imported != f"{module.name}.{names[0]}":
            return self.find(".".join([imported, *names[1:]]))
        # Each once: two modules may import all of each other.
        stars, module.stars = module.stars, []
        try:
            found = (self.find(".".join([star, *names])) for star in stars)
            return next((each for each in found if each is not None), None)
        finally:
            module.stars = stars

    def classes(self, name: str) -> list[Definition]:
        """Every class of this name in the package; only files with the name are parsed."""
        found = []
        for path in sorted(self.root.rglob("*.py")):
            if f"class {name}" in path.read_text(encoding="utf-8", errors="replace"):
                definition = self.module(path).definitions.get(name)
                if definition is not None and definition.is_class:
                    found.append(definition)
        return found


def dotted_name(expression: ast.expr, imports: dict[str, str]) -> str | None:
    """`F.relu` as torch.nn.functional.relu; a name that is not imported stays as it is."""
    names: list[str] = []
    while isinstance(expression, ast.Attribute):
        names.append(expression.attr)
        expression = expression.value
    if not isinstance(expression, ast.Name):
        return None
    return ".".join([imports.get(expression.id, expression.id), *reversed(names)])


def definition_of(name: str, module: Module, imports: dict[str, str]) -> Definition | None:
    """The class or function that a name refers to in a module: one of this module or of its package."""
    if name in module.definitions:
        return module.definitions[name]
    head, _, rest = name.partition(".")
    dotted = f"{imports[head]}.{rest}".rstrip(".") if head in imports else name
    found = module.package.find(dotted)
    return found if isinstance(found, Definition) else None


def bases(definition: Definition) -> list[Definition]:
    """A class and its bases in the same package, nearest first."""
    found = [definition]
    assert isinstance(definition.node, ast.ClassDef)
    for base in definition.node.bases:
        name = ast.unparse(base)
        parent = definition_of(name, definition.module, definition.module.imports)
        if parent is not None and parent.is_class and parent.node is not definition.node:
            found += [each for each in bases(parent) if each not in found]
    return found


def method(definition: Definition, name: str) -> Definition | None:
    for each in bases(definition):
        for statement in each.node.body:
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)) and statement.name == name:
                return Definition(each.module, statement)
    return None


def is_module_class(definition: Definition) -> bool:
    """Whether the bases of a class say that it is an nn.Module."""
    for each in bases(definition):
        assert isinstance(each.node, ast.ClassDef)
        for base in each.node.bases:
            name = dotted_name(base, each.module.imports) or ""
            if name.startswith("torch.nn.") or name.split(".")[-1] in ("Module", "ModelMixin", "PreTrainedModel"):
                return True
    return False
