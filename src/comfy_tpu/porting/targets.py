"""Targets of a check: a class of diffusers, a model directory, a Python file, or a class of a module."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from comfy_tpu.errors import ComfyTpuError, InvalidValueError, UnsupportedError, join_names, section_of
from comfy_tpu.json_input import read_json
from comfy_tpu.porting.source import Definition, Package

ANY_ERROR = (Exception, SystemExit)
"""Errors of a model's code, with the one that ends a program: it ends only the step that ran the model."""


def describe_error(error: BaseException) -> str:
    """An error's class, unless it is one of ours, and the first line of its message, without a pointer to the guide."""
    first = next(iter(section_of(error)[0].strip().splitlines()), "")
    return first if isinstance(error, ComfyTpuError) else f"{type(error).__name__}: {first}".rstrip(": ")


@dataclasses.dataclass(frozen=True)
class Target:
    """A model class, with the configuration to build it with."""

    name: str
    definition: Definition
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_diffusers(self) -> bool:
        return self.definition.module.package.name == "diffusers"

    @property
    def place(self) -> tuple[str, int]:
        """The file and line of the class."""
        return str(self.definition.module.path), self.definition.node.lineno

    def load(self) -> type:
        """The class. Imports its module: the model's code runs from here on."""
        module = self.definition.module
        try:
            loaded = importlib.import_module(module.name) if module.package.name else _import_file(module.path)
        except ANY_ERROR as error:
            advice = "mend that, or only read it: comfy-tpu port check --static"
            if isinstance(error, ImportError) and "relative import" in str(error):
                advice = f"name it by its package, from the folder above that: package.{module.path.stem}:{self.name}"
            raise UnsupportedError(
                f"{module.path} cannot be imported ({type(error).__name__}: {error}); {advice}"
            ) from error
        found = getattr(loaded, self.definition.node.name)
        if not isinstance(found, type) or not issubclass(found, torch.nn.Module):
            raise InvalidValueError(f"{self.name} is not a model, which is a class that extends nn.Module; give one")
        return found


def _import_file(path: Path) -> Any:
    name = f"comfy_tpu_ported_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look there
    sys.path.append(str(path.parent))  # last: a neighbour called random.py must not take its place
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def find_targets(text: str) -> list[Target]:
    """The target that a text names, or those of a model directory. Nothing is imported."""
    path = Path(text)
    if path.is_dir():
        return _directory_targets(path)
    file, _, name = (text, "", "") if path.is_file() else text.rpartition(":")
    if Path(file).is_file():
        return [_file_target(Path(file), name)]
    if (file or text).endswith(".py") or (not file and "/" in text):
        missing = file or text
        raise InvalidValueError(f"there is no {missing}; give a Python file, a model directory or the name of a class")
    return [_module_target(file, name) if file else _diffusers_target(text)]


def _file_target(path: Path, name: str) -> Target:
    definitions = Package(path.resolve().parent).module(path.resolve()).definitions
    classes = {each: definition for each, definition in definitions.items() if definition.is_module_class}
    if not classes:
        raise InvalidValueError(f"{path} has no model, which is a class that extends nn.Module; give the file of one")
    if name and name not in classes:
        raise InvalidValueError(f"{path} has no model class {name}; it has {join_names(classes)}")
    parts = {
        node.id
        for each, definition in classes.items()
        for node in ast.walk(definition.node)
        if isinstance(node, ast.Name) and node.id != each
    }
    roots = [name] if name else [each for each in classes if each not in parts]
    if len(roots) != 1:
        raise InvalidValueError(
            f"{path} has {len(roots)} models that are no part of another ({join_names(roots or classes)}); say which: "
            f"{path}:{[*roots, *classes][0]}"
        )
    return Target(roots[0], classes[roots[0]])


def _find_package(name: str) -> Package:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        raise InvalidValueError(f"there is no package {name} here; install it, or give the path of a Python file")
    origin = Path(spec.origin)
    return Package(origin.parent, name if origin.name == "__init__.py" else "")


def _module_target(dotted: str, name: str) -> Target:
    found = _find_package(dotted.partition(".")[0]).find(f"{dotted}.{name}")
    if not isinstance(found, Definition) or not found.is_class:
        raise InvalidValueError(f"{dotted} has no class {name}; give module:Class, or a Python file")
    return Target(name, found)


def _diffusers_target(name: str) -> Target:
    found = _find_package("diffusers").find_class(name)
    if found is None:
        raise InvalidValueError(
            f"diffusers has no class {name}; give one of its models, a model directory, model.py:Class or module:Class"
        )
    if found.is_module_class:
        return Target(name, found)
    if not name.endswith("Pipeline"):
        raise InvalidValueError(
            f"{name} of diffusers is not a model, which is a class that extends nn.Module; give one"
        )
    parts = join_names(_pipeline_models(found)) or "its transformer and its vae"
    raise InvalidValueError(
        f"{name} is a pipeline, not a model; check its parts ({parts}), or use comfy-tpu port new NAME --from {name}"
    )


def _pipeline_models(pipeline: Definition) -> list[str]:
    """The models of diffusers that a pipeline is made of, by the annotations of its __init__."""
    initial = pipeline.methods.get("__init__")
    if initial is None:
        return []
    arguments = (*initial.arguments.args, *initial.arguments.kwonlyargs)
    annotations = [each.annotation for each in arguments if each.annotation is not None]
    names = [node.id for each in annotations for node in ast.walk(each) if isinstance(node, ast.Name)]
    parts = [initial.module.resolve(name) for name in names]
    return list(dict.fromkeys(part.node.name for part in parts if part is not None and part.is_module_class))


def _directory_targets(path: Path) -> list[Target]:
    config = path / "config.json"
    if config.is_file():
        return [_config_target(config)]
    index = path / "model_index.json"
    if not index.is_file():
        raise InvalidValueError(f"{path} has neither model_index.json nor config.json; give a model of diffusers")
    components = [
        component
        for component, origin in read_object(index).items()
        if isinstance(origin, list) and origin[:1] == ["diffusers"] and (path / component / "config.json").is_file()
    ]
    if not components:
        raise InvalidValueError(f"{index} names no model of diffusers with a config.json; is the download complete?")
    return [_config_target(path / component / "config.json") for component in components]


def _config_target(path: Path) -> Target:
    config = read_object(path)
    name = config.get("_class_name")
    if not isinstance(name, str):
        raise InvalidValueError(f"{path} does not say _class_name; give a model of diffusers")
    try:
        target = _diffusers_target(name)
    except InvalidValueError as error:
        raise InvalidValueError(f"{path} says _class_name {name!r}: {error}") from None
    return dataclasses.replace(target, config={key: value for key, value in config.items() if not key.startswith("_")})


def read_object(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file of a model directory."""
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise InvalidValueError(f"there is no {path}; give a model directory in diffusers' layout") from None
    except (OSError, ValueError) as error:
        raise InvalidValueError(f"{path} is not JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise InvalidValueError(f"{path} holds a {type(content).__name__}, expected an object; download it again")
    return content
