"""`port new --pack`: what ComfyUI and pip see of a pack, beside our own pack and without it.

The parity test of a pack is run by tests/porting/test_new.py.
"""

import ast
import dataclasses
import json
import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

from comfy_tpu.installation.pack import is_pack
from comfy_tpu.porting.scaffold.destination import Pack
from comfy_tpu.porting.scaffold.files import write
from tests.comfy_pack.loading import ROOT
from tests.porting.small_pixart import make_facts

NAME, PACKAGE, KEY = "pixart_sigma", "comfy_tpu_pixart_sigma", "PixArtSigma"
KINDS = ("TextEncoder", "TPUSampler", "TPUVAEDecoder", "TPUPipeline")
WIDGETS = ("INT", "FLOAT", "STRING", "COMBO", "BOOLEAN")
LOAD = """
import asyncio, importlib.util, json, sys
from pathlib import Path
sys.path.append({tests!r})
import fake_comfyui
import torch
fake_comfyui.install(Path({models!r}))
found = []
for number, directory in enumerate({directories!r}):
    spec = importlib.util.spec_from_file_location(f"pack_{{number}}", Path(directory) / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    nodes = asyncio.run(asyncio.run(module.comfy_entrypoint()).get_node_list())
    found.append([node.define_schema().declared for node in nodes])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("packs") / "ComfyUI-PixArtSigma-TPU"
    destination = Pack(root, NAME)
    destination.check(writes=True)
    write(root, destination.files(make_facts(NAME, PACKAGE)))
    return root


@pytest.fixture(scope="module")
def site(pack: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pack's own wheel, installed; built from a copy, which leaves no files in the pack."""
    place = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(place)]
    subprocess.run(build, cwd=pack, check=True, capture_output=True)
    (wheel,) = place.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    return place


def python(*arguments: str, path: tuple[Path, ...], check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(
        [sys.executable, "-P", *arguments], env=environment, capture_output=True, text=True, check=False, cwd=path[0]
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def load(*directories: Path, path: tuple[Path, ...], models: Path) -> list[list[dict[str, Any]]]:
    """The nodes that each of the packs gives to one ComfyUI, which loads them in this order."""
    tests = str(ROOT / "tests" / "comfy_pack")
    code = LOAD.format(tests=tests, models=str(models), directories=list(map(str, directories)))
    found: list[list[dict[str, Any]]] = json.loads(python("-c", code, path=path).stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("is_first", "is_installed"),
    [
        pytest.param(True, True, id="installed, before ours"),
        pytest.param(False, True, id="installed, behind ours", marks=pytest.mark.slow),
        pytest.param(False, False, id="linked, behind ours", marks=pytest.mark.slow),
    ],
)
def test_no_node_is_registered_twice(
    is_first: bool, is_installed: bool, pack: Path, site: Path, tmp_path: Path
) -> None:
    order = (pack, ROOT) if is_first else (ROOT, pack)
    path = (ROOT / "src", *([site] if is_installed else []))
    found = load(*order, path=path, models=tmp_path)
    ids = [node["id"] for nodes in found for node in nodes]
    assert len(ids) == len(set(ids))
    assert {f"{KEY}{kind}" for kind in KINDS} <= set(ids)
    # Ours knows an installed family, so whoever is asked first has its nodes; one that is only linked has its own.
    ours = found[order.index(ROOT)]
    assert len(found[order.index(pack)]) == (0 if is_installed and not is_first else len(KINDS))
    assert any(node["id"] == "TPUInfo" for node in ours)


@pytest.fixture(scope="module")
def video_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, as if it made videos: the nodes have more inputs."""
    facts = make_facts(NAME, PACKAGE)
    calls = dataclasses.replace(facts.calls, makes_images=False, temporal_scale=4, frames_multiple=8)
    defaults = dataclasses.replace(facts.defaults, num_frames=49, fps=8)
    root = tmp_path_factory.mktemp("packs") / "video"
    write(root, Pack(root, NAME).files(dataclasses.replace(facts, calls=calls, defaults=defaults)))
    return root


@pytest.mark.thorough  # by default: our own, tests/comfy_pack/test_examples.py
@pytest.mark.parametrize("kind", [pytest.param("pack", marks=pytest.mark.slow), "video_pack"])
def test_the_example_has_the_widgets_of_the_nodes(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """With the defaults of the card; a value in another place would be another setting."""
    pack: Path = request.getfixturevalue(kind)
    (nodes,) = load(pack, path=(ROOT / "src",), models=tmp_path)
    schemas = {node["id"]: node for node in nodes}
    workflow = json.loads((pack / f"example_workflows/{NAME}_tpu_basic.json").read_text(encoding="utf-8"))
    assert list(schemas) == [f"{KEY}{each}" for each in KINDS], "the pack works alone, and has its own nodes only"
    assert {node["category"] for node in nodes} == {f"TPU/{KEY}"}
    own = [node for node in workflow["nodes"] if node["type"] in schemas]
    assert [node["type"] for node in own] == [f"{KEY}{kind}" for kind in KINDS[:3]]
    for node in own:
        check_example_node(node, schemas[node["type"]])
    by_id = {node["id"]: node for node in workflow["nodes"]}
    for link, source, output, target, place, kind in workflow["links"]:
        assert by_id[target]["inputs"][place]["link"] == link
        assert by_id[source]["outputs"][output]["type"] == kind
        assert link in by_id[source]["outputs"][output]["links"]


def check_example_node(node: dict[str, Any], schema: dict[str, Any]) -> None:
    widgets = [each for each in schema["inputs"] if each["type"] in WIDGETS]
    others = [each for each in schema["inputs"] if each["type"] not in WIDGETS]
    assert [socket["name"] for socket in node["inputs"]] == [each["id"] for each in [*others, *widgets]]
    assert [(each["name"], each["type"]) for each in node["outputs"]] == [
        (each["name"], each["type"]) for each in schema["outputs"]
    ]
    values = iter(node["widgets_values"])
    for each in widgets:
        value = next(values)
        assert each["id"] == "prompt" or value == each["default"], each["id"]
        if each.get("control_after_generate"):
            assert next(values) == "fixed"
    assert next(values, None) is None


@pytest.mark.slow
def test_pip_installs_a_pack_for_development(pack: Path, tmp_path: Path) -> None:
    """Without a network: hatchling is all that the build takes. The environment sees the packages of this one."""
    venv.create(tmp_path / "venv")
    executable = tmp_path / "venv" / "bin" / "python"
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (packages / "tests.pth").write_text(sysconfig.get_path("purelib"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    install = [executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "-e", pack]
    subprocess.run(install, env=environment, check=True, capture_output=True)
    code = f"from comfy_tpu.families.registry import load_family; print(load_family({KEY!r}).transformer.classes)"
    environment["PYTHONPATH"] = str(ROOT / "src")
    done = subprocess.run([executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["('PixArtTransformer2DModel',)"], done.stderr


@pytest.mark.thorough  # by default: an outside family, tests/families/test_outside_family.py
def test_an_installed_pack_is_known_to_the_command_line(site: Path) -> None:
    code = "from comfy_tpu.families.registry import family_cards; print([card.package for card in family_cards()])"
    assert PACKAGE in python("-c", code, path=(ROOT / "src", site)).stdout
    again = ("-m", "comfy_tpu.cli", "port", "new", NAME, "--from", "PixArtSigmaPipeline", "--pack", "x")
    done = python(*again, path=(ROOT / "src", site), check=False)
    assert done.returncode == 1
    assert f"NAME {NAME} is taken by the family PixArtSigma ({PACKAGE}); choose another name" in done.stderr


def test_the_code_of_a_pack_is_what_its_card_says(site: Path) -> None:
    code = f"from comfy_tpu.families.registry import load_family; print(load_family({KEY!r}).card.name)"
    assert python("-c", code, path=(ROOT / "src", site)).stdout.split() == [KEY]


def test_what_registries_read(pack: Path) -> None:
    project = tomllib.loads((pack / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["name"] == "comfyui-pixartsigma-tpu"
    assert project["project"]["entry-points"]["comfy_tpu.families"] == {NAME: PACKAGE}
    assert project["tool"]["comfy"]["DisplayName"] == "ComfyUI-PixArtSigma-TPU"
    *_, requirement = (pack / "requirements.txt").read_text().splitlines()
    assert project["project"]["dependencies"] == [requirement]
    assert not is_pack(pack), "`comfy-tpu install` would take it for a copy of our own pack"
    for page in ("README.md", "README.zh-CN.md"):
        assert "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS" in (pack / page).read_text(encoding="utf-8")


def test_a_pack_without_ruff_is_the_same_program(pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever installed a wheel has no developer tools: texts are not formatted then, and say the same."""
    monkeypatch.setattr("comfy_tpu.porting.scaffold.renderer._find_ruff", lambda: None)
    for name, text in Pack(tmp_path / "x", NAME).files(make_facts(NAME, PACKAGE)).items():
        if name.endswith(".py"):
            formatted = ast.parse((pack / name).read_text(encoding="utf-8"))
            imports = (ast.Import, ast.ImportFrom)  # may be in another order
            body = [
                [ast.dump(each) for each in tree.body if not isinstance(each, imports)]
                for tree in (ast.parse(text), formatted)
            ]
            assert body[0] == body[1], name
