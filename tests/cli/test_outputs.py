"""Outputs that would destroy something are refused in one line, before anything is computed."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from benchmarks.vae import report as vae_report
from comfy_tpu.bench import report
from comfy_tpu.cli import main as cli
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.pipeline import video
from tests.cli.fake_pipeline import FakePipeline

PROMPT = "a red circle moving left"


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty directory, with the fake pipeline, whose model has files in ./demo."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(video, "VideoPipeline", FakePipeline)
    (tmp_path / "demo" / "vae").mkdir(parents=True)
    (tmp_path / "demo" / "model_index.json").write_text("{}")
    save_file({"w": torch.zeros(3)}, tmp_path / "demo" / "vae" / "w.safetensors")
    return tmp_path


def contents(directory: Path) -> dict[str, Any]:
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What it says; nothing has changed then."""
    before = contents(Path())
    capsys.readouterr()
    assert cli.main(list(argv)) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("comfy-tpu: ")
    assert err.count("\n") == 1
    assert contents(Path()) == before
    return err.removeprefix("comfy-tpu: ").strip()


VIDEOS = {
    "an image": (["-o", "x.png", "--num-frames", "1"], "x.png", "x.png"),
    "an image by another name": (["-o", "x.png", "--num-frames", "1"], "./demo/../x.png", "x.png"),
    "a frame": (["-o", "out/"], "out/frame_0003.png", "out/frame_%04d.png"),
    "a frame that is removed": (["-o", "f%d.png"], "f99.png", "f%d.png"),
    "one of several": (["-o", "x.png", "--num-frames", "1", "--num-videos", "2"], "x-1.png", "x-1.png"),
}


@pytest.mark.parametrize(("flags", "sheet", "video_path"), VIDEOS.values(), ids=VIDEOS)
def test_contact_sheet_in_the_place_of_a_video(
    flags: list[str],
    sheet: str,
    video_path: str,
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakePipeline, "_begin", lambda *arguments: pytest.fail("work was begun"))
    said = refused(capsys, "generate", PROMPT, *flags, "--contact-sheet", sheet)
    expected = f"--contact-sheet {Path(sheet)} is the same file as {video_path}, which is written too"
    assert said == f"{expected}; choose another name"


def test_a_contact_sheet_that_several_videos_leave_free(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["-o", "x.png", "--num-frames", "1", "--num-videos", "2", "--contact-sheet", "x.png"]
    assert cli.main(["generate", PROMPT, *flags]) == 0
    assert all(Path(name).is_file() for name in ("x.png", "x-0.png", "x-1.png"))


def test_two_videos_of_one_link(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("real.npy").touch()
    for index in range(2):
        Path(f"x-{index}.npy").symlink_to("real.npy")
    said = refused(capsys, "generate", PROMPT, "-o", "x.npy", "--num-videos", "2")
    assert said == "--output x-1.npy is the same file as x-0.npy, which is written too; choose another name"


def test_an_input_is_not_replaced(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").mkdir()
    for name in ("first.png", "out/frame_0004.png"):
        Image.new("RGB", (8, 8)).save(name)
    save_file({"w": torch.zeros(3)}, "style.safetensors")
    assert cli.main(["encode", PROMPT]) == 0
    assert cli.main(["denoise", "text.safetensors"]) == 0
    os.link("latents.safetensors", "again.safetensors")
    replaced = {
        "first.png": ["generate", PROMPT, "--image", "first.png", "--num-frames", "1", "-o", "./first.png"],
        "out/frame_0004.png": ["generate", PROMPT, "--image", "out/frame_0004.png", "-o", "out/"],
        "text.safetensors": ["denoise", "text.safetensors", "-o", "text.safetensors", "--force"],
        "style.safetensors": [
            *("denoise", "text.safetensors", "--lora", "style.safetensors:0.5", "-o", "style.safetensors", "--force"),
        ],
        "demo/vae/w.safetensors": ["encode", PROMPT, "-o", "demo/vae/w.safetensors", "--force"],
        "demo/model_index.json": ["calibrate", "demo", "-o", "demo/model_index.json"],
    }
    for name, argv in replaced.items():
        said = refused(capsys, *argv)
        assert said.startswith("--output ")
        assert said.endswith(f" would replace {name}, which is an input of this run; choose another name")
    sheet = ["--contact-sheet", "first.png"]
    assert refused(capsys, "generate", PROMPT, "--image", "first.png", "-o", "x.gif", *sheet).startswith(
        "--contact-sheet first.png would replace first.png, which is an input"
    )


def test_a_sequence_that_a_killed_run_left_is_made_again(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["encode", PROMPT]) == 0
    assert cli.main(["denoise", "text.safetensors"]) == 0
    for lacking in ("frame_0000.png", "frame_0003.png", "frame_0008.png"):
        assert cli.main(["decode", "latents.safetensors", "-o", "out/"]) == 0
        assert "is there already" not in capsys.readouterr().err
        assert cli.main(["decode", "latents.safetensors", "-o", "out/"]) == 0
        assert "is there already" in capsys.readouterr().err
        Path("out", lacking).unlink()


def test_calibrate_still_writes_into_the_model(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert cli.main(["calibrate", "demo"]) == 0
    assert Path("demo/reuse.json").is_file()


def test_what_is_no_file(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakePipeline, "open", lambda *arguments, **more: pytest.fail("the model was opened"))
    for name in ("pipe.mp4", "pipe.png", "pipe.safetensors"):
        os.mkfifo(name)
    kind = "is a named pipe, expected a file; choose another name"
    assert refused(capsys, "generate", PROMPT, "-o", "pipe.mp4") == f"--output pipe.mp4 {kind}"
    sheet = ["-o", "x.mp4", "--contact-sheet", "pipe.png"]
    assert refused(capsys, "generate", PROMPT, *sheet) == f"--contact-sheet pipe.png {kind}"
    for force in ([], ["--force"]):
        said = refused(capsys, "encode", PROMPT, "-o", "pipe.safetensors", *force)
        assert said == f"--output pipe.safetensors {kind}"
    assert all(Path(name).is_fifo() for name in ("pipe.mp4", "pipe.png", "pipe.safetensors"))


def test_plan_does_not_replace_the_model(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comfy_tpu.planning.models.find_model", lambda model, ignored: None)
    said = refused(capsys, "plan", "./demo", "--tpu", "v6e-8", "--export", "demo/model_index.json")
    assert said == (
        "--export demo/model_index.json would replace demo/model_index.json, which is an input of this run; choose "
        "another name"
    )


def test_files_of_benchmarks(place: Path) -> None:
    page, samples = Path("page.md"), Path("samples.json")
    with pytest.raises(InvalidValueError, match=r"^markdown=page.md is the same file as page.md, which is written too"):
        report.RunFiles.check(json=page, markdown=page)
    with pytest.raises(InvalidValueError, match=r"^output=page.md is the same file as page.md, which is written too"):
        vae_report.check_output(page, page)
    vae_report.check_output(page, samples)
    page.write_text("{}")
    with pytest.raises(InvalidValueError, match=r"^output=page.md would replace page.md, which is an input"):
        report.write_page([page], page)
