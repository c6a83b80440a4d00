"""A model's source: modules of one package, parsed and never imported, and the definitions that names refer to."""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
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

    @property
    def is_module_class(self) -> bool:
        """Whether the bases of a class say that it is an nn.Module."""
        names = [dotted_name(base, each.module.imports) or "" for each in self.bases for base in _base_nodes(each)]
        usual = ("Module", "ModelMixin", "PreTrainedModel")
        return any(name.startswith("torch.nn.") or name.split(".")[-1] in usual for name in names)

    @functools.cached_property
    def bases(self) -> list[Definition]:
        """A class and its bases in the same package, nearest first; empty for a function."""
        found = [self] if self.is_class else []
        for base in _base_nodes(self):
            parent = self.module.resolve(ast.unparse(base))
            if parent is not None and parent.node is not self.node:
                found += [each for each in parent.bases if each not in found]
        return found

    @functools.cached_property
    def methods(self) -> dict[str, Definition]:
        """The methods of a class and its bases, by name."""
        found: dict[str, Definition] = {}
        for each in self.bases:
            for statement in each.node.body:
                if isinstance(statement, Function):
                    found.setdefault(statement.name, Definition(each.module, statement))
        return found

    @functools.cached_property
    def decorators(self) -> set[str]:
        return {ast.unparse(decorator) for decorator in self.node.decorator_list}

    @property
    def arguments(self) -> ast.arguments:
        """The parameters of a function."""
        assert isinstance(self.node, Function)
        return self.node.args


def _base_nodes(definition: Definition) -> list[ast.expr]:
    return definition.node.bases if isinstance(definition.node, ast.ClassDef) else []


class Module:
    def __init__(self, package: Package, path: Path, name: str) -> None:
        self.package = package
        self.path = path
        self.name = name
        try:
            self.tree = ast.parse(path.read_bytes(), str(path))
        except SyntaxError as error:
            raise InvalidValueError(
                f"{path}:{error.lineno or 1} is not Python ({error.msg}); correct the line and try again"
            ) from None
        except ValueError as error:
            raise InvalidValueError(f"{path} is not Python ({error}); give a text file") from None
        except (MemoryError, RecursionError):  # of the parser, for about 6000 levels: not of the machine
            raise InvalidValueError(f"{path} is nested too deeply for Python; write it with fewer levels") from None
        self.definitions: dict[str, Definition] = {}
        self.imports: dict[str, str] = {}
        """Dotted names by local name: {"F": "torch.nn.functional"}."""
        self.stars: list[str] = []
        """Modules of `from module import *`."""
        for statement in _top_level(self.tree.body):
            if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                self.definitions.setdefault(statement.name, Definition(self, statement))
            else:
                names = self.imported_names(statement)
                star = names.pop("*", None)
                self.stars += [star.removesuffix(".*")] if star is not None else []
                self.imports.update(names)

    def imported_names(self, statement: ast.stmt) -> dict[str, str]:
        """Dotted names by local name; empty for a statement that imports nothing."""
        if isinstance(statement, ast.Import):
            return {
                alias.asname or alias.name.split(".")[0]: alias.name if alias.asname else alias.name.split(".")[0]
                for alias in statement.names
            }
        if not isinstance(statement, ast.ImportFrom):
            return {}
        origin = statement.module or ""
        if statement.level:
            parts = [*self.name.split("."), *([""] if self.path.name == "__init__.py" else [])]
            origin = ".".join([*parts[: -statement.level], origin]).strip(".")
        return {alias.asname or alias.name: f"{origin}.{alias.name}".strip(".") for alias in statement.names}

    def resolve(self, name: str, imports: Mapping[str, str] | None = None) -> Definition | None:
        """The class or function of this module or its package that a name refers to here."""
        if name in self.definitions:
            return self.definitions[name]
        head, _, rest = name.partition(".")
        known = self.imports if imports is None else imports
        found = self.package.find(f"{known[head]}.{rest}".rstrip(".") if head in known else name)
        return found if isinstance(found, Definition) else None


def _top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, and those in an `if` or a `try`, where a library may be missing."""
    for statement in body:
        yield statement
        if isinstance(statement, (ast.If, ast.Try)):
            handlers = [handler.body for handler in getattr(statement, "handlers", ())]
            for part in (statement.body, statement.orelse, *handlers):
                yield from _top_level(part)


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
        if self.name and parts.pop(0) != self.name:
            return None
        path = self.root
        while parts and (path / parts[0]).is_dir():
            path /= parts.pop(0)
        is_file = bool(parts) and (path / f"{parts[0]}.py").is_file()
        file = path / (f"{parts.pop(0)}.py" if is_file else "__init__.py")
        return self._find_in(self.module(file), parts) if file.is_file() else None

    def _find_in(self, module: Module, names: list[str]) -> Definition | Module | None:
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

    @functools.cached_property
    def _texts(self) -> list[tuple[Path, str]]:
        """All files. Those of diffusers have 28 MB, and take a third of a second to read."""
        paths = sorted(self.root.rglob("*.py"))
        return [(path, path.read_text(encoding="utf-8", errors="replace")) for path in paths]

    def find_class(self, name: str) -> Definition | None:
        """The first class of this name in the package; only files with the name are parsed."""
        if not name.isidentifier():  # an empty one is in every file
            return None
        for path, text in self._texts:
            if f"class {name}" in text:
                definition = self.module(path).definitions.get(name)
                if definition is not None and definition.is_class:
                    return definition
        return None


def dotted_name(expression: ast.expr, imports: Mapping[str, str]) -> str | None:
    """`F.relu` as torch.nn.functional.relu; a name that is not imported stays as it is."""
    if isinstance(expression, ast.Name):
        return imports.get(expression.id, expression.id)
    if not isinstance(expression, ast.Attribute):
        return None
    owner = dotted_name(expression.value, imports)
    return None if owner is None else f"{owner}.{expression.attr}"
