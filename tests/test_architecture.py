"""Style, types and layers. Here, and only here, so that plain `pytest` checks all of them."""

import graphlib
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(sys.executable).parent  # not resolved: a virtual environment's python is a link


def run_tool(name, *arguments, cwd=ROOT, source=ROOT / "src"):
    tool = SCRIPTS / name
    if not tool.exists():
        tool = Path(sysconfig.get_path("scripts")) / name
    environment = {**os.environ, "PYTHONPATH": str(source), "NO_COLOR": "1"}
    return subprocess.run([tool, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "command",
    [("ruff", "check"), ("ruff", "format", "--check"), ("mypy",), ("lint-imports",)],
    ids=" ".join,
)
def test_tool_is_content(command):
    done = run_tool(*command)
    assert done.returncode == 0, done.stdout + done.stderr


CHINESE = re.compile("[\u3000-\u303f\u3400-\u9fff\uf900-\ufaff\uff00-\uffef]")
"""Characters of Chinese and Japanese, their punctuation, and full-width forms."""


def test_the_package_is_written_in_english():
    """Texts in Chinese are files: locales/zh, docs, and the templates of a pack's pages."""
    found = {
        f"{path.relative_to(ROOT)}:{number}"
        for path in (ROOT / "src").rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if CHINESE.search(line)
    }
    assert found == set()


@pytest.mark.parametrize("text", ["“模型”", "模型", "，", "（"])
def test_chinese_is_found(text):
    assert bool(CHINESE.search(text))


def find_circle(package):
    """A circle of modules that import each other, at the top or in functions; empty where there is none."""
    graph = grimp.build_graph(package, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    imports[package] = set()  # it imports its interface when that is asked for, and its version is imported everywhere
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_modules_import_each_other():
    assert find_circle("comfy_tpu") == []


def test_a_circle_is_found(tmp_path, monkeypatch):
    package = tmp_path / "round_package"
    package.mkdir()
    for name, line in {
        "__init__": "",
        "a": "from round_package import b",
        "b": "def f():\n    import round_package.a",
    }.items():
        (package / f"{name}.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    assert set(find_circle("round_package")) == {"round_package.a", "round_package.b"}


LAYERS = [
    "comfy",
    "cli",
    "serving",
    "bench",
    "comfyui_api",
    "diagnosis",
    "installation",
    "jobs",
    "planning",
    "porting",
    "remote",
    "pipeline",
    "hub",
    "families",
    "compiler",
]
LAYERS += ["bridge", "kernels", "parallel"]

VIOLATIONS = {
    "a lower layer imports a higher one": ("compiler/x.py", "import comfy_tpu.families", "Imports go downwards"),
    "kernels import bridge": ("kernels/x.py", "import comfy_tpu.bridge", "Imports go downwards"),
    "parallel imports kernels": ("parallel/x.py", "import comfy_tpu.kernels", "Imports go downwards"),
    "the command imports the nodes": ("cli/x.py", "import comfy_tpu.comfy", "Imports go downwards"),
    "the nodes import the command": ("comfy/x.py", "import comfy_tpu.cli", "Imports go downwards"),
    "a diagnosis is used by a pipeline": ("pipeline/x.py", "import comfy_tpu.diagnosis", "Imports go downwards"),
    "a diagnosis installs": ("diagnosis/x.py", "import comfy_tpu.installation", "Imports go downwards"),
    "config imports a layer": ("config.py", "import comfy_tpu.parallel", "Imports go downwards"),
    "a package without a layer": ("utils.py", "", "Imports go downwards"),
    "torchax in a family": ("families/x.py", "import torchax", "Only bridge imports torchax"),
    "torchax in the compiler, inside a function": (
        "compiler/x.py",
        "def f():\n    from torchax import interop",
        "Only bridge imports torchax",
    ),
    "torch in a kernel": ("kernels/x.py", "import torch.nn", "kernels and parallel are plain JAX"),
    "torch in parallel": ("parallel/x.py", "from torch import nn", "kernels and parallel are plain JAX"),
    "ComfyUI in the compiler": ("compiler/x.py", "import comfy.model_management", "Only comfy/ imports ComfyUI"),
    "ComfyUI's paths in the command": ("cli/x.py", "import folder_paths", "Only comfy/ imports ComfyUI"),
    "ComfyUI's server in a pipeline": (
        "pipeline/x.py",
        "from server import PromptServer",
        "Only comfy/ imports ComfyUI",
    ),
    "one family imports another": (
        "families/flux/model.py",
        "import comfy_tpu.families.wan.model",
        "Families do not import each other",
    ),
    "torch in a card": ("families/flux/card.py", "import torch", "Cards import neither torch nor jax"),
    "jax in the registry": ("families/registry.py", "import jax", "Cards import neither torch nor jax"),
    "jax in the driver of a batch": (
        "jobs/driver.py",
        "import jax",
        "The driver of a batch needs neither torch nor jax",
    ),
    "torch in what lists models": (
        "hub/x.py",
        "import torch",
        "Listing and downloading models needs neither torch nor jax",
    ),
    "jax in what runs on a server": (
        "remote/x.py",
        "import jax",
        "Running on a server needs no jax here",
    ),
    "the resolver of the static reader imports its visitor": (
        "porting/resolver.py",
        "import comfy_tpu.porting.visitor",
        "No import circle in porting",
    ),
}

ALLOWED = {
    "torchax in bridge": ("bridge/x.py", "import torchax"),
    "torchax through bridge": ("compiler/x.py", "import comfy_tpu.bridge.y"),
    "torch in a family": ("families/x.py", "import torch"),
    "ComfyUI in the nodes": ("comfy/x.py", "import comfy.utils, comfy_api.latest, folder_paths, nodes, server"),
    "one family in several files": ("families/flux/model.py", "import comfy_tpu.families.flux.card"),
    "a family uses the shared vocabulary": ("families/flux/model.py", "import comfy_tpu.families.model_family"),
    "a family uses a shared part": ("families/flux/model.py", "import comfy_tpu.families.shared.patches"),
}


@pytest.fixture
def skeleton(tmp_path):
    """A package with the layers and nothing in them, under our contracts."""
    package = tmp_path / "comfy_tpu"
    modules = ("__init__", "config", "distribution", "errors", "facade", "finite", "json_input", "quiet")
    modules += ("safetensors_input", "terminal_text")
    files = [*(f"{name}.py" for name in modules), *(f"{layer}/__init__.py" for layer in LAYERS)]
    files += [
        f"families/{name}.py"
        for name in ("card", "model_family", "presets", "registry", "shared/__init__", "shared/patches")
    ]
    files += [f"families/{family}/{name}.py" for family in ("flux", "wan") for name in ("__init__", "card", "model")]
    drivers = ("driver", "folder", "ledger", "outcome", "output_names", "request", "sources", "worker_thread")
    rays = ("ray_actor", "ray_cluster", "ray_slices", "ray_workers")
    files += [f"jobs/{name}.py" for name in (*drivers, *rays)]
    for file in files:
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).touch()
    (package / "bridge/y.py").write_text("import torchax")
    (package / "porting/visitor.py").write_text("import comfy_tpu.porting.resolver")
    return tmp_path


def lint(skeleton):
    return run_tool("lint-imports", "--config", ROOT / "pyproject.toml", "--no-cache", cwd=skeleton, source=skeleton)


@pytest.mark.parametrize("violation", VIOLATIONS)
def test_contract_is_broken_by(violation, skeleton):
    file, line, contract = VIOLATIONS[violation]
    (skeleton / "comfy_tpu" / file).write_text(line)
    done = lint(skeleton)
    broken = [line.split(" BROKEN")[0] for line in done.stdout.splitlines() if " BROKEN" in line]
    assert broken == [contract], done.stdout + done.stderr
    assert done.returncode == 1


def test_contracts_allow_what_they_should(skeleton):
    for file, line in ALLOWED.values():
        (skeleton / "comfy_tpu" / file).write_text(line)
    done = lint(skeleton)
    assert done.returncode == 0, done.stdout + done.stderr
