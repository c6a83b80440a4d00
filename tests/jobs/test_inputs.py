"""Images and LoRAs of a job: addresses with a strength behind them, and files that cannot be."""

from pathlib import Path

import fsspec
import pytest

from comfy_tpu.cli.batch import _common_values
from comfy_tpu.cli.main import _parse, main
from comfy_tpu.config import Lora
from comfy_tpu.jobs.folder import file_fingerprint
from comfy_tpu.jobs.inputs import Inputs
from comfy_tpu.jobs.request import Request, parse_lora


@pytest.fixture
def inputs():
    made = Inputs()
    yield made
    made.close()


def test_a_lora_at_an_address_has_its_strength_and_its_name(inputs: Inputs) -> None:
    fsspec.filesystem("memory").pipe_file("/loras/style.safetensors", b"weights")
    (lora,) = inputs.fetch({"lora": ["memory://loras/style.safetensors:0.8:low"]})["lora"]
    assert (lora.strength, lora.noise, lora.path.name) == (0.8, "low", "style.safetensors")
    assert lora.path.read_bytes() == b"weights"


def test_local_files_stay_where_they_are(inputs: Inputs, tmp_path: Path) -> None:
    (tmp_path / "a:0.5").write_bytes(b"")
    values = {
        "prompt": "x",
        "image": ["a.png"],
        "last_image": "b.png",
        "lora": [f"{tmp_path}/a:0.5", "c.safetensors:2"],
    }
    assert inputs.fetch(values) == {
        "prompt": "x",
        "image": ["a.png"],
        "last_image": "b.png",
        "lora": [Lora(tmp_path / "a:0.5"), Lora(Path("c.safetensors"), 2.0)],
    }


def test_the_content_of_a_lora_decides_also_with_a_strength(tmp_path: Path) -> None:
    def identity(content: bytes, strength: str) -> str:
        (tmp_path / "a.safetensors").write_bytes(content)
        request = Request({"prompt": "x", "lora": [f"{tmp_path}/a.safetensors{strength}"]})
        return request.identity("m", file_fingerprint)

    assert identity(b"1", ":0.5") != identity(b"2", ":0.5")
    assert identity(b"1", ":0.5") != identity(b"1", ":0.6")
    assert identity(b"1", ":0.5") == identity(b"1", ":0.5")


def test_addresses_of_the_command_line_keep_their_slashes() -> None:
    flags = ["--image", "gs://b/x.png", "--last-image", "s3://b/y.png", "--lora", "gs://b/z.safetensors:0.5"]
    values = _common_values(_parse(["batch", "jobs.txt", "-o", "out", *flags]))
    assert values == {
        "image": ["gs://b/x.png"],
        "last_image": "s3://b/y.png",
        "lora": ["gs://b/z.safetensors:0.5"],
    }


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_what_cannot_be_a_path(name: str) -> None:
    assert str(parse_lora(name).path) == name


def test_such_a_line_fails_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text('{"prompt": "x", "lora": "%s"}\n' % ("x" * 5000))
    assert main(["batch", str(jobs), "-o", str(tmp_path / "out"), "--mesh", "single"]) == 1
    assert "0 of 1 jobs done, 1 failed" in capsys.readouterr().err
