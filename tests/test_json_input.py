"""JSON that is nested too deeply, or holds no text: refused in a sentence by every reader there is."""

import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, PngImagePlugin
from safetensors.torch import load_file, save_file

from comfy_tpu.bench.results import read_runs
from comfy_tpu.cli.main import main
from comfy_tpu.compiler.checkpoint import Checkpoint
from comfy_tpu.config import GenerationSettings, Lora
from comfy_tpu.errors import ComfyTpuError
from comfy_tpu.json_input import MAX_DEPTH, parse_json, read_json
from comfy_tpu.pipeline import artifacts, media
from comfy_tpu.pipeline.lora import open_loras
from comfy_tpu.pipeline.model_files import ModelFiles
from comfy_tpu.pipeline.reuse import find_curve
from comfy_tpu.planning.program_file import read_program
from comfy_tpu.porting.scaffold.pipelines import find_source
from comfy_tpu.porting.targets import find_targets
from tests.pipeline import small_pipeline
from tests.pipeline.test_lora_files import GOOD

ROOT = Path(__file__).parents[1]
DEPTHS = (MAX_DEPTH + 1, 900, 100_000)
"""Just too deep; less deep than Python's recursion limit; and more."""


def nested(depth: int) -> str:
    return "[" * (depth - 1) + "{}" + "]" * (depth - 1)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("kind", [str, str.encode])
def test_depth_has_a_limit(depth: int, kind: Callable[[str], str | bytes]) -> None:
    with pytest.raises(ValueError, match="nested more than 64 levels deep"):
        parse_json(kind(nested(depth)))


def test_what_is_within_the_limit_is_read(tmp_path: Path) -> None:
    value: Any = {"é": [1, 2.5, None, True, "\U0001f600"], "deep": json.loads(nested(MAX_DEPTH - 1))}
    (tmp_path / "x.json").write_text(json.dumps(value))
    assert read_json(tmp_path / "x.json") == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ("", "Expecting value"),
        (b"\xff", "invalid start byte"),
        ('{"x": "\\ud800"}', "half a character"),
        ('{"\\uDFFF": 1}', "half a character"),
        ("1" * 5000, "digits"),
    ],
)
def test_what_is_no_json_is_refused(text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)


def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_pipeline.directory(), tmp_path / "model"))


def of_model(name: str, read: Callable[[ModelFiles], object] = lambda files: files) -> Callable[[Path, str], object]:
    def open_it(tmp_path: Path, text: str) -> object:
        path = model(tmp_path) / name
        path.write_text(f'{{"deep": {text}}}')
        return read(ModelFiles.open(tmp_path / "model"))

    return open_it


def of_lora(tmp_path: Path, text: str) -> object:
    save_file(GOOD, tmp_path / "x.safetensors", {"lora_adapter_metadata": text})
    return open_loras([Lora(tmp_path / "x.safetensors")], ModelFiles.open(small_pipeline.directory()))


def of_artifact(key: str) -> Callable[[Path, str], object]:
    def open_it(tmp_path: Path, text: str) -> object:
        path = tmp_path / "x.safetensors"
        own = ModelFiles.open(small_pipeline.directory())

        class Named:
            model_name, model_fingerprint, dtype_name = "small", own.fingerprint, "float32"

        artifacts.save_latents(path, torch.zeros(1, 4, 1, 2, 2), "a", GenerationSettings(), Named())
        save_file(load_file(path), path, artifacts.read_metadata(path, "latents") | {key: text})
        return artifacts.read_header(path, "latents")

    return open_it


def of_weights_index(tmp_path: Path, text: str) -> object:
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {text}}}')
    return Checkpoint.open(tmp_path)


def of_safetensors_header(tmp_path: Path, text: str) -> object:
    header = f'{{"x": {text}}}'.encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return Checkpoint.open(tmp_path)


def of_results(tmp_path: Path, text: str) -> object:
    (tmp_path / "x.json").write_text(text)
    return read_runs(tmp_path / "x.json")


def of_plan(tmp_path: Path, text: str) -> object:
    with zipfile.ZipFile(tmp_path / "x.plan", "w") as archive:
        archive.writestr("plan.json", text)
    return read_program(tmp_path / "x.plan")


def of_port(name: str, find: Callable[[str], object]) -> Callable[[Path, str], object]:
    def open_it(tmp_path: Path, text: str) -> object:
        (tmp_path / name).write_text(text)
        return find(str(tmp_path))

    return open_it


READERS: dict[str, Callable[[Path, str], object]] = {
    **{name: of_model(name) for name in ("model_index.json", "vae/config.json", "transformer/config.json")},
    "generation.json": of_model("generation.json", lambda files: files.defaults),
    "reuse.json": of_model("reuse.json", find_curve),
    "tokenizer.json": of_model("tokenizer/tokenizer.json", lambda files: files.tokenizer("tokenizer")),
    "tokenizer_config.json": of_model("tokenizer/tokenizer_config.json", lambda files: files.tokenizer("tokenizer")),
    "LoRA": of_lora,
    "artifact's settings": of_artifact("settings"),
    "artifact's LoRAs": of_artifact("loras"),
    "index of weights": of_weights_index,
    "header of weights": of_safetensors_header,
    "results": of_results,
    "plan": of_plan,
    "port check": of_port("config.json", find_targets),
    "port new": of_port("model_index.json", find_source),
}


THIRD_PARTY = ("tokenizer.json", "tokenizer_config.json", "header of weights")
"""Read by libraries with limits of their own."""


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("reader", sorted(set(READERS) - set(THIRD_PARTY)))
def test_every_reader_refuses_what_is_nested_too_deeply(reader: str, depth: int, tmp_path: Path) -> None:
    with pytest.raises(ComfyTpuError, match="nested more than 64 levels deep"):
        READERS[reader](tmp_path, nested(depth))


@pytest.mark.parametrize("reader", THIRD_PARTY)
def test_what_libraries_say_of_it_becomes_a_sentence(reader: str, tmp_path: Path) -> None:
    with pytest.raises(ComfyTpuError, match=r"cannot be read .*(download .* again|as safetensors)"):
        READERS[reader](tmp_path, nested(100_000))


def test_a_comment_that_is_nested_too_deeply_is_somebody_elses(tmp_path: Path) -> None:
    texts = PngImagePlugin.PngInfo()
    texts.add_text("Comment", nested(100_000))
    Image.new("RGB", (2, 2)).save(tmp_path / "x.png", pnginfo=texts)
    assert media.read_metadata(tmp_path / "x.png") == {}


def test_json_on_a_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["port", "check", "WanTransformer3DModel", "--config", nested(900)]) == 1
    assert "--config is not JSON (it is nested more than 64 levels deep)" in capsys.readouterr().err


def test_nothing_else_parses_json_that_others_wrote() -> None:
    # What a process of ours wrote for another one of ours, and files of this package.
    own = {
        "cli/batch.py",
        "cli/session.py",
        "diagnosis/facts.py",
        "diagnosis/model_probe.py",
        "families/qwen_image/card.py",
        "families/wan/card.py",
        "hub/sizes.py",
        "jobs/ledger.py",
        "jobs/request.py",
        "jobs/served_ledger.py",
        "json_input.py",
        "parallel/coordination.py",
        "parallel/host_link.py",
        "planning/compilation.py",
        "pipeline/step_work.py",
        "planning/worker.py",
    }
    source = ROOT / "src" / "comfy_tpu"
    found = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if re.search(r"json\.loads?\(", path.read_text(encoding="utf-8"))
    }
    assert found == own


@pytest.mark.timeout(30)
def test_a_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model_index.json")
    with pytest.raises(ComfyTpuError, match=r"model_index.json cannot be read \(.*model_index.json is not a file\)"):
        ModelFiles.open(tmp_path)
