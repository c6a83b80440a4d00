"""Every module that reads a file, or what others sent, is in the table of readers, or is here with the reason."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import comfy_tpu
from tests.fuzz.test_readers import READERS

PACKAGE = Path(comfy_tpu.__file__).parent
READING_CALLS = frozenset(
    (
        *(
            "json.load",
            "json.loads",
            "read_json",
            "parse_json",
            "safe_open",
            "load_file",
            "tomllib.loads",
            "csv.reader",
        ),
        *("Image.open", "open_image_file", "av.open", "zipfile.ZipFile", "sqlite3.connect", "np.load", "np.memmap"),
        *("Tokenizer.from_file", "jax.export.deserialize", "ast.parse", "check_header"),
    )
)
READING_METHODS = frozenset(("read_text", "read_bytes", "from_pretrained"))
_LAST_NAMES = READING_METHODS | {name.rpartition(".")[2] for name in READING_CALLS} | {"open"}

OWN = "a file of this package"
KERNEL = "what the kernel says"
CHILD = "what a process of ours wrote for us, in a folder that only this user can write"
SERVER = "requests: tests/serving/test_schema.py makes them from the schema"
ELSEWHERE: dict[str, str] = {
    "bench.machine": KERNEL,
    "bench.page_texts": OWN,
    "bench.reported": OWN,
    "cli.session": "JSON that artifacts.py has checked",
    "compiler.stored.identity": "installed packages and their sources, which this process runs",
    "diagnosis.comfyui": "ComfyUI's requirements.txt: ComfyUI is code that the user runs",
    "diagnosis.facts": "what a process of ours wrote, the kernel, and installed packages",
    "diagnosis.model_probe": CHILD,
    "diagnosis.tested_versions": OWN,
    "distribution": "the record of an installed package",
    "families.qwen_image.card": OWN,
    "families.shared.published": OWN,
    "families.wan.card": OWN,
    "families.ltx2.image": "a video that this function made in memory",
    "hub.disk": KERNEL,
    "hub.sizes": OWN,
    "installation.comfyui": "a ComfyUI, which is code that the user runs",
    "installation.pack": OWN,
    "jobs.driver_lock": "two lines of text that another host's driver wrote, which are compared and not parsed",
    "jobs.ray_actor": "files that this process placed",
    "jobs.ray_cluster": KERNEL,
    "jobs.stages": "a file that this process made",
    "json_input": "the parser itself: tests/test_json_input.py",
    "kernels.tuning": OWN,
    "parallel.hosts": "files that the user named, which are sent and not parsed",
    "parallel.tpu_holders": KERNEL,
    "pipeline.step_work": "JSON that this process made",
    "planning.worker": CHILD,
    "porting.bisect": "weights beside a module that is imported, which is code that the user runs",
    "porting.scaffold.destination": "a checkout that the user develops",
    "porting.scaffold.files": "a checkout that the user develops",
    "porting.scaffold.pipelines": "sources of an installed package",
    "porting.scaffold.renderer": OWN,
    "porting.scaffold.small_pipeline": OWN,
    "porting.small_models": OWN,
    "porting.structure": "sources of a module that is imported",
    "cli.port": "an argument: tests/fuzz/test_flags.py",
    "remote.pipeline": "a LoRA of the user's, which is hashed and not parsed",
    "serving.image_answers": "a file that this server made",
    "serving.stages": SERVER,
    "serving.uploads": SERVER,
}


@functools.cache
def reading_modules() -> set[str]:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Call) and _reads(node):
                found.add(".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"))
    return found


def _reads(call: ast.Call) -> bool:
    last = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if last not in _LAST_NAMES:  # to unparse all calls takes two seconds
        return False
    name = ast.unparse(call.func)
    if name in READING_CALLS or name.rpartition(".")[2] in READING_METHODS:
        return True
    is_open = name.rpartition(".")[2] == "open" and name.rpartition(".")[0] not in ("os", "")
    return is_open and any(isinstance(each, ast.Constant) and each.value == "rb" for each in call.args)


def test_every_reader_is_in_the_table() -> None:
    fuzzed = {module for reader in READERS.values() for module in reader.modules}
    missing = reading_modules() - fuzzed - set(ELSEWHERE)
    assert not missing, f"{sorted(missing)} read files: add a reader to tests/fuzz, or say here why none is needed"


def test_the_table_names_modules_that_are_there() -> None:
    fuzzed = {module for reader in READERS.values() for module in reader.modules}
    for module in fuzzed | set(ELSEWHERE):
        path = PACKAGE / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file(), module
    assert not fuzzed & set(ELSEWHERE)


def test_exceptions_still_read() -> None:
    assert set(ELSEWHERE) <= reading_modules()
