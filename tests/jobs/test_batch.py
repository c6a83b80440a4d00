"""comfy-tpu batch with a small model: the videos are those of `generate`, whether they share a step or not."""

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from comfy_tpu.cli.main import main
from comfy_tpu.config import RuntimeConfig
from comfy_tpu.pipeline import media
from comfy_tpu.pipeline.video import VideoPipeline
from tests.closeness import psnr
from tests.pipeline import small_pipeline

PROMPTS = ("a red circle", "a blue square", "a green star")
COMMON = ("--mesh", "single", "--height", "32", "--width", "32", "--num-frames", "5", "--steps", "2")
SETTINGS: dict[str, Any] = {
    "height": 32,
    "width": 32,
    "num_frames": 5,
    "num_inference_steps": 2,
}


def jobs(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines))
    return path


def batch(file: Path, out: Path, *more: str) -> int:
    return main(["batch", str(file), "-o", str(out), "--model", str(small_pipeline.directory()), *COMMON, *more])


@functools.cache
def opened() -> VideoPipeline:
    return VideoPipeline.open(small_pipeline.directory(), RuntimeConfig(mesh="single"))


def expected(prompt: str, seed: int) -> np.ndarray:
    pipeline = opened()
    frames = torch.cat(list(pipeline.generate(prompt, pipeline.settings(seed=seed, **SETTINGS))), dim=1)
    return (frames[0] * 255).round().byte().numpy()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A directory of videos that were made one by one, the first prompt twice, and the prompts that were encoded."""
    out, encoded = tmp_path_factory.mktemp("alone"), list[str]()
    encode = VideoPipeline.encode

    def record(pipeline: VideoPipeline, prompt: str, *rest: Any) -> Any:
        encoded.append(prompt)
        return encode(pipeline, prompt, *rest)

    prompts = (*PROMPTS, PROMPTS[0])
    lines = [{"prompt": prompt, "seed": seed, "output": f"{seed}.npy"} for seed, prompt in enumerate(prompts)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VideoPipeline, "encode", record)
        assert batch(jobs(out / "jobs.jsonl", *lines), out, "--batch-size", "1") == 0
    return out, encoded


def test_one_by_one_they_are_those_of_a_pipeline(made: tuple[Path, list[str]]) -> None:
    for seed, prompt in enumerate((*PROMPTS, PROMPTS[0])):
        assert np.array_equal(np.load(made[0] / f"{seed}.npy"), expected(prompt, seed))


def test_a_repeated_prompt_is_encoded_once(made: tuple[Path, list[str]]) -> None:
    assert sorted(made[1]) == sorted(PROMPTS)


@pytest.mark.thorough  # by default: one by one, above
def test_in_one_step_they_are_the_same_but_for_the_order_of_sums(
    made: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"prompt": prompt, "seed": seed, "output": f"{seed}.npy"} for seed, prompt in enumerate(PROMPTS)]
    bad: list[dict[str, Any] | str] = [{"prompt": "x", "height": 33}, "not json"]
    assert batch(jobs(tmp_path / "jobs.jsonl", *bad, *lines), tmp_path, "--batch-size", "2", "--json") == 1
    check_events([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    videos = [torch.from_numpy(np.load(tmp_path / f"{seed}.npy")) / 255 for seed in range(3)]
    for seed, video in enumerate(videos):
        alone = torch.from_numpy(np.load(made[0] / f"{seed}.npy")) / 255
        assert (video - alone).abs().max() <= 1.01 / 255
    assert psnr(videos[0], videos[1]) < 60, "the comparison would see another prompt or seed"


def check_events(happened: list[dict[str, Any]]) -> None:
    """Of two bad lines and three good ones: the rest goes on, and the events say so."""
    by_event = {each["event"]: each for each in happened}
    assert by_event["refused"]["line"] == 2
    assert "height=33" in by_event["failed"]["error"]
    assert by_event["failed"]["final"]
    assert by_event["failed"]["line"] == 1
    done = {each["line"]: each["outputs"][0]["name"] for each in happened if each["event"] == "done"}
    assert done == {3: "0.npy", 4: "1.npy", 5: "2.npy"}
    summary = {"event": "summary", "done": 3, "failed": 1, "open": 0, "refused": 1}
    assert summary.items() <= by_event["summary"].items()


@pytest.mark.thorough  # by default: lines that fail by themselves, test_inputs.py
def test_a_bad_seed_fails_no_other_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The others would share its step. A file tells how it was made, as asked for on the command line."""
    lines = ({"prompt": "x", "seed": "one"}, {"prompt": "x", "output": "x.exe"}, {"prompt": PROMPTS[0]})
    assert batch(jobs(tmp_path / "jobs.jsonl", *lines), tmp_path, "--seed", "3") == 1
    errors = capsys.readouterr().err
    assert "line 1 (x-" in errors
    assert "failed: seed='one' is not a whole number" in errors
    assert "line 2 (x.exe) failed: output=" in errors
    assert "1 of 3 jobs done, 2 failed" in errors
    (video,) = tmp_path.glob("*.mp4")
    assert video.name.startswith("a-red-circle-")
    metadata = media.read_metadata(video)
    assert (metadata["prompt"], metadata["seed"]) == (PROMPTS[0], "3")


def test_a_mesh_without_its_devices_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"a cat {number}" for number in range(30)]
    assert batch(jobs(tmp_path / "prompts.txt", *lines), tmp_path / "out", "--mesh", "sp=16") == 1
    errors = capsys.readouterr().err
    assert errors.count("needs 16 devices but there are 8") == 1
    assert "; so do all jobs of its model and mesh" in errors
    assert "0 of 30 jobs done, 30 failed" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing.txt", "-o", "out"), "JOBS missing.txt cannot be read"),
        (("jobs.txt", "-o", "jobs.txt"), "--output jobs.txt cannot be written"),
        (("jobs.txt", "-o", "out", "--batch-size", "0"), "--batch-size 0 is neither auto nor a number"),
        (("jobs.txt", "-o", "out", "--format", "xml"), "--format xml is unknown"),
        (("jobs.txt", "-o", "out", "--model", "nowhere"), "nowhere"),
    ],
)
def test_bad_input(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    jobs(tmp_path / "jobs.txt", "a cat")
    assert main(["batch", *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_goes_on_where_it_was(number: signal.Signals, tmp_path: Path) -> None:
    lines = [{"prompt": f"a red circle {seed}", "seed": seed, "output": f"{seed}.npy"} for seed in range(12)]
    file = jobs(tmp_path / "jobs.jsonl", *lines)
    command = [sys.executable, "-m", "comfy_tpu.cli", "batch", str(file), "-o", str(tmp_path), "--json"]
    command += ["--model", str(small_pipeline.directory()), "--batch-size", "1", *COMMON]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)["event"] == "done":
                process.send_signal(number)
                break
        process.stdout.read()
    assert process.returncode == 128 + number
    kept = sorted(path.name for path in tmp_path.glob("*.npy"))
    assert 1 <= len(kept) < 12
    assert not list(tmp_path.glob("*.partial"))
    assert batch(file, tmp_path, "--batch-size", "1") == 0
    assert len(list(tmp_path.glob("*.npy"))) == 12
