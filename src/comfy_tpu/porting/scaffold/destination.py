"""Where a new family is written: into a checkout of comfy-tpu, or as a pack of its own."""

from __future__ import annotations

import abc
import json
import keyword
import os
import re
import shlex
import uuid
from pathlib import Path

import comfy_tpu
from comfy_tpu.distribution import HOME_PAGE, pip_command
from comfy_tpu.errors import InvalidValueError, UnsupportedError
from comfy_tpu.families.registry import family_cards
from comfy_tpu.porting.scaffold.facts import Facts
from comfy_tpu.porting.scaffold.family_files import common_values, render_family, render_parity_case
from comfy_tpu.porting.scaffold.files import Files, check_writable
from comfy_tpu.porting.scaffold.renderer import MARK, render, render_directory

_REGISTRY = "src/comfy_tpu/families/registry.py"
_PARITY_TEST = "tests/families/test_ported_parity.py"
_NAME_MAX = 40
"""Characters of a NAME: file systems take 255 bytes, and words are put around it."""
_PROMPT = "A paper boat on a quiet pond at dawn, mist over the water, soft light"


class Destination(abc.ABC):
    """Subclasses name the package and list the files."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, name

    package: str
    """The importable package of the family."""
    package_directory: str
    """Below the root."""
    test: tuple[str, ...]
    """The arguments of pytest in the root directory."""
    source_path: tuple[str, ...]
    """Directories below the root that the test needs on its PYTHONPATH."""

    @abc.abstractmethod
    def check(self, *, writes: bool) -> None:
        """Raises InvalidValueError where the family cannot be written, before the model is looked at."""

    @abc.abstractmethod
    def files(self, facts: Facts) -> Files:
        """All files of the family, by their paths below the root."""

    @abc.abstractmethod
    def next_steps(self, facts: Facts) -> list[str]:
        """Commands for a shell, each with the reason as a comment."""

    def _package_files(self, facts: Facts) -> Files:
        return {f"{self.package_directory}/{name}": text for name, text in render_family(facts).items()}


class Checkout(Destination):
    """One directory, one line in the registry, one test configuration."""

    def __init__(self, root: Path, name: str) -> None:
        super().__init__(root, name)
        self.package = f"comfy_tpu.families.{name}"
        self.package_directory = f"src/comfy_tpu/families/{name}"
        self.test_configuration = f"tests/families/ported/{name}.py"
        self.test = (_PARITY_TEST, "-k", name)
        self.source_path = ("src", ".")

    def check(self, *, writes: bool) -> None:
        for file in (self.package_directory, f"{self.package_directory}.py", self.test_configuration):
            if os.path.lexists(self.root / file):
                again = f"; an earlier `port new {self.name}` wrote it" if self._is_ported(self.root / file) else ""
                raise InvalidValueError(
                    f"name={self.name} is taken: {file} exists{again}, and nothing is overwritten; choose another name",
                    field="name",
                )
        if writes:
            check_writable(self.root, (f"{self.package_directory}/card.py", self.test_configuration, _REGISTRY))

    def _is_ported(self, path: Path) -> bool:
        path = path / "__init__.py" if path.is_dir() else path
        return path.is_file() and MARK in path.read_text(encoding="utf-8", errors="replace")

    def files(self, facts: Facts) -> Files:
        registry = (self.root / _REGISTRY).read_text(encoding="utf-8")
        return {
            **self._package_files(facts),
            _REGISTRY: add_to_registry(registry, self.package),
            self.test_configuration: render_parity_case(facts),
        }

    def next_steps(self, facts: Facts) -> list[str]:
        nodes = f"{facts.title}TextEncoder"
        return [
            "make pages   # English names, help pages and model tables of the new nodes, from their card",
            f"edit locales/zh/nodeDefs.json   # Chinese names of {nodes} and the others: `make pages` says which",
            "make test   # the record of all nodes, tests/comfy_pack/golden_nodes.json, wants the new ones",
        ]


class Pack(Destination):
    """A directory for ComfyUI's custom_nodes that pip installs beside comfy-tpu."""

    def __init__(self, root: Path, name: str) -> None:
        super().__init__(root, name)
        self.package = f"comfy_tpu_{name}"
        self.package_directory = f"src/{self.package}"
        self.test = ("tests",)
        self.source_path = ("src",)

    def check(self, *, writes: bool) -> None:
        if os.path.lexists(self.root) and not self.root.is_dir():
            raise InvalidValueError(f"pack={self.root} is no directory; give a new or an empty one", field="pack")
        if self.root.is_dir() and any(self.root.iterdir()):
            raise InvalidValueError(
                f"pack={self.root} is not empty, and nothing is overwritten; give a new or an empty directory",
                field="pack",
            )
        if writes:
            check_writable(self.root, ("pyproject.toml",))

    def files(self, facts: Facts) -> Files:
        values = {
            **common_values(facts),
            "pack": f"ComfyUI-{facts.title}-TPU",
            "distribution": f"comfyui-{facts.title.lower()}-tpu",
            "outputs": "IMAGE" if facts.calls.makes_images else "IMAGE, fps, VIDEO",
            "version": comfy_tpu.__version__,
            "home_page": HOME_PAGE,
        }
        return {
            **render_directory("pack", **values),
            **self._package_files(facts),
            f"example_workflows/{self.name}_tpu_basic.json": render_workflow(facts, values),
            "tests/parity_case.py": render_parity_case(facts),
        }

    def next_steps(self, facts: Facts) -> list[str]:
        return [
            f"{pip_command('install', '-e', str(self.root))}   # the commands know the family from then on",
            f"ln -s {shlex.quote(str(self.root))} ComfyUI/custom_nodes/   # nodes and example workflow",
        ]


def find_destination(name: str, *, into: str | None, pack: str | None) -> Destination:
    """`into`: another checkout than that of this command. `pack`: the directory of a pack."""
    check_name(name)
    if into is not None and pack is not None:
        raise InvalidValueError(
            f"pack={pack} and a checkout are given; give --pack DIR or --into DIR, not both", field="pack"
        )
    return Pack(Path(pack).absolute(), name) if pack is not None else Checkout(find_checkout(into), name)


def find_checkout(into: str | None) -> Path:
    places = [Path(into)] if into else [Path(comfy_tpu.__file__).parents[2], Path.cwd()]
    for place in places:
        if all((place / mark).is_file() for mark in (_REGISTRY, _PARITY_TEST, "pyproject.toml")):
            return place.resolve()
    missing = f"into={into} is no checkout of comfy-tpu" if into else "no checkout is here, nor around this comfy-tpu"
    raise InvalidValueError(
        f"{missing}; give --pack DIR for a pack of its own, or git clone {HOME_PAGE} and name its directory by --into",
        field="into",
    )


def check_name(name: str) -> None:
    """Raises InvalidValueError for a name that no package can have, or that a family has."""
    usable = name.isidentifier() and name == name.lower() and name.isascii() and not keyword.iskeyword(name)
    if not usable or name.startswith("_"):
        raise InvalidValueError(
            f"name={name!r} is no name for a package; use small letters, digits and _ such as my_model",
            field="name",
        )
    if len(name) > _NAME_MAX:
        raise InvalidValueError(
            f"name={name[:_NAME_MAX]}… has {len(name)} characters; use {_NAME_MAX} at most", field="name"
        )
    for card in family_cards():
        if name == card.name or card.name == f"comfy_tpu_{name}":
            raise InvalidValueError(
                f"name={name} is taken by the family {card.title} ({card.package}); choose another name", field="name"
            )


def add_to_registry(text: str, package: str) -> str:
    """The text of families/registry.py with one more line in BUILT_IN."""
    found = re.search(r'^BUILT_IN = \(\n(?:    "[\w.]+",\n)*', text, flags=re.MULTILINE)
    if found is None:
        raise UnsupportedError(f"{_REGISTRY} has no list BUILT_IN to add a line to; restore it from git")
    return f'{text[: found.end()]}    "{package}",\n{text[found.end() :]}'


def render_workflow(facts: Facts, values: dict[str, object]) -> str:
    """Text encoder, sampler, VAE decoder and a node that saves, with the card's defaults."""
    quoted = {name: json.dumps(str(value), ensure_ascii=False)[1:-1] for name, value in values.items()}
    number = str(uuid.uuid5(uuid.NAMESPACE_URL, f"{facts.package}_basic"))
    return render(f"{facts.noun}_workflow.json", **quoted, id=number, prompt=_PROMPT)
