"""Steps that are saved: a run that was ended goes on, and its latents have the bits of an undisturbed one."""

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import comfy_tpu
from comfy_tpu.cli.main import main
from comfy_tpu.cli.progress import Display
from comfy_tpu.config import GenerationSettings, RuntimeConfig
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.pipeline.embeddings import PromptEmbeddings
from comfy_tpu.pipeline.model_files import DEMO_DIRECTORY
from comfy_tpu.pipeline.progress import Progress
from comfy_tpu.pipeline.step_checkpoint import StepCheckpoint
from comfy_tpu.pipeline.video import VideoPipeline
from tests.families import wan_pipelines
from tests.pipeline import small_pipeline
from tests.waiting import wait_for

PROMPT = "a red circle moving left"
SMALL: dict[str, Any] = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 4, "seed": 3}


class Killed(BaseException):
    """As a kill: nothing in the pipeline handles it."""


class Run(NamedTuple):
    pipeline: VideoPipeline
    embeddings: PromptEmbeddings
    settings: GenerationSettings

    def denoise(self, path: Path, every: int = 1, kill_at: int = 0) -> tuple[torch.Tensor | None, list[int]]:
        """Latents, None if the run was killed as it reported a step of this number, before it was saved; and the
        numbers of the steps that were computed."""
        steps: list[int] = []

        def report(progress: Progress) -> None:
            if progress.stage == "denoising" and progress.preview is not None:
                steps.append(progress.done)
                if progress.done == kill_at:
                    raise Killed

        before, self.pipeline.on_progress = self.pipeline.on_progress, report
        try:
            checkpoint = StepCheckpoint(path, every)
            return self.pipeline.denoise(self.embeddings, self.settings, checkpoint=checkpoint), steps
        except Killed:
            return None, steps
        finally:
            self.pipeline.on_progress = before


@functools.cache
def opened(directory: Path) -> VideoPipeline:
    return VideoPipeline.open(directory, RuntimeConfig(mesh="single"))


def small(prompt: str = PROMPT, **changed: Any) -> Run:
    return make_run(small_pipeline.directory(), prompt, **SMALL | changed)


@functools.cache
def make_run(directory: Path, prompt: str = PROMPT, images: int = 0, **chosen: Any) -> Run:
    pipeline = opened(directory)
    pictures = [wan_pipelines.picture(0)] * images
    settings = pipeline.settle_context(pipeline.settings(**chosen), pictures)
    return Run(pipeline, pipeline.encode(prompt, settings, pictures), settings)


def check_all_kills(run: Run, path: Path, *, steps: int, every: int, kills: Any) -> None:
    expected = run.pipeline.denoise(run.embeddings, run.settings)
    for number in kills:
        assert run.denoise(path, every, kill_at=number)[0] is None
        made, computed = run.denoise(path, every)
        assert made is not None
        assert torch.equal(made, expected), number
        per_segment = run.settings.num_inference_steps
        saved = max((number - 1) // every * every, (number - 1) // per_segment * per_segment)
        assert computed == list(range(saved + 1, steps + 1))
        path.unlink()


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """UniPC, whose steps read two earlier samples and outputs."""
    check_all_kills(small(), tmp_path / "x.safetensors", steps=4, every=2, kills=(1, 3, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [
        {"scheduler": "euler"},
        {"num_inference_steps": 7, "guidance_until": 0.5},
        {"num_videos": 2},
        {"num_frames": 21, "context_frames": 9, "context": "uniform"},
        {"num_frames": 21, "context_frames": 9, "context": "static", "context_noise": "freenoise"},
    ],
    ids=str,
)
def test_every_step_of_other_settings(changed: dict[str, Any], tmp_path: Path) -> None:
    run = small(**changed)
    steps = run.settings.num_inference_steps
    check_all_kills(run, tmp_path / "x.safetensors", steps=steps, every=1, kills=range(1, steps + 1))


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["unipc", "dpm++"])
def test_reused_steps_of_the_demo_model(scheduler: str, tmp_path: Path) -> None:
    """A reused step reads the last velocity, which a run that goes on has from the file."""
    run = make_run(DEMO_DIRECTORY, num_frames=5, num_inference_steps=12, reuse=0.2, scheduler=scheduler)
    assert run.pipeline.plan(run.settings).reused
    check_all_kills(run, tmp_path / "x.safetensors", steps=12, every=1, kills=range(2, 13))


@pytest.mark.slow
def test_two_transformers(tmp_path: Path) -> None:
    run = make_run(wan_pipelines.directory("2.2"), **SMALL, boundary=0.8, flow_shift=3.0)
    assert {step.transformer for step in run.pipeline.plan(run.settings)} == {0, 1}
    check_all_kills(run, tmp_path / "x.safetensors", steps=4, every=1, kills=range(1, 5))


@pytest.mark.slow
def test_segments_from_an_image(tmp_path: Path) -> None:
    """Three segments of two steps; the last step of a segment is always saved."""
    chosen = SMALL | {"width": 64, "num_frames": 21, "context_frames": 9, "num_inference_steps": 2}
    run = make_run(wan_pipelines.directory("5B image"), images=1, **chosen, max_sequence_length=32)
    check_all_kills(run, tmp_path / "x.safetensors", steps=6, every=5, kills=range(1, 7))


@pytest.mark.slow
def test_segments_of_animate(tmp_path: Path) -> None:
    from tests.families import test_wan_animate

    pipeline = test_wan_animate.opened("single")
    settings = test_wan_animate.settings((48, 80), "two segments")
    embeddings = pipeline.encode(PROMPT, settings, test_wan_animate.given(15, True))
    run, steps = Run(pipeline, embeddings, settings), settings.num_inference_steps
    segments = pipeline.family.card.segment_count(settings)
    assert segments > 1
    kills = range(1, segments * steps + 1)
    check_all_kills(run, tmp_path / "x.safetensors", steps=segments * steps, every=1, kills=kills)


@pytest.mark.slow
def test_sound(tmp_path: Path) -> None:
    from tests.families import test_ltx2

    pipeline = test_ltx2.opened("single")
    settings = test_ltx2.settings(pipeline, "64x64x9")
    run, steps = Run(pipeline, pipeline.encode(PROMPT, settings), settings), settings.num_inference_steps
    check_all_kills(run, tmp_path / "x.safetensors", steps=steps, every=1, kills=range(1, steps + 1))


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"prompt": "a blue circle moving left"}, "another prompt"),
        ({"seed": 4, "flow_shift": 2.5}, "another seed, another flow_shift"),
    ],
)
def test_another_request_begins_anew(
    changed: dict[str, Any], what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x.safetensors"
    small().denoise(path, kill_at=3)
    run = small(**changed)
    made, computed = run.denoise(path)
    assert made is not None
    assert torch.equal(made, run.pipeline.denoise(run.embeddings, run.settings))
    assert computed == [1, 2, 3, 4]
    assert caplog.messages == [f"{path} is of another run ({what}), and this one begins at the first step"]


def test_other_embeddings_and_machines_begin_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "x.safetensors"
    run = small()
    run.denoise(path, kill_at=2)
    positive = {name: rows + 1e-6 for name, rows in run.embeddings.positive.items()}
    other = run._replace(embeddings=dataclasses.replace(run.embeddings, positive=positive))
    assert other.denoise(path, every=9, kill_at=1)[1] == [1]
    described = run.pipeline._describe_steps(run.embeddings, run.settings, ())
    checkpoint = StepCheckpoint(path, 1)
    checkpoint.begin(described | {"mesh": "dp=8", "jax": "0.1"}, steps=4)
    assert checkpoint.resumed_after == 0
    assert [message.partition("(")[2].partition(")")[0] for message in caplog.messages] == [
        "another embeddings",
        "another version of jax, another mesh",
    ]
    checkpoint.begin(described, steps=4)
    assert checkpoint.resumed_after == 1


@pytest.mark.parametrize("damage", ["empty", "truncated", "flipped", "too many steps"])
def test_a_damaged_file_is_replaced(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "x.safetensors"
    run = small()
    run.denoise(path, kill_at=3)
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[-9] ^= 1
    elif damage == "too many steps":
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        save_file(load_file(path), path, metadata | {"done": "5"})
        content = bytearray(path.read_bytes())
    path.write_bytes({"empty": b"", "truncated": content[:-100]}.get(damage, content))
    checkpoint = StepCheckpoint(path, 1)
    checkpoint.check()
    assert run.denoise(path, kill_at=2)[1] == [1, 2]
    (message,) = caplog.messages
    assert message.startswith(f"{path} is damaged")
    assert message.endswith(", so this run begins at the first step and replaces it")
    assert run.denoise(path, kill_at=2)[1] == [2]  # of the new one


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"weight": torch.zeros(1)}, path)
    with pytest.raises(InvalidValueError, match="would be replaced, and is not one of comfy-tpu's; move it away"):
        StepCheckpoint(path, 1).check()
    with pytest.raises(InvalidValueError, match="checkpoint=.* is in .*no, and there is no .*; create it first"):
        StepCheckpoint(tmp_path / "no" / "no" / "x.safetensors", 1).check()


@pytest.mark.parametrize("is_seen", [True, False])
def test_steps_are_not_saved_through_a_link(is_seen: bool, tmp_path: Path) -> None:
    """A link of that name in a shared directory, there before the run or put there meanwhile, may point to any file."""
    path, other = tmp_path / "x.safetensors", tmp_path / "other"
    other.write_bytes(b"somebody's")
    path.symlink_to(other)
    if is_seen:
        with pytest.raises(InvalidValueError, match="is a link, and steps are not saved through one; remove it, or"):
            StepCheckpoint(path, 1).check()
    else:
        small().denoise(path, kill_at=2)
        assert not path.is_symlink()
    assert other.read_bytes() == b"somebody's"


@pytest.mark.parametrize("every", [0, -1, "two", True, 1.5])
def test_numbers_of_steps(every: Any) -> None:
    with pytest.raises(InvalidValueError, match=f"checkpoint_every={every} is not a number of steps; give a whole"):
        StepCheckpoint(Path("x.safetensors"), every)


def test_a_full_disk_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small()

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("comfy_tpu.pipeline.step_checkpoint.os.fsync", fail)
    made, computed = run.denoise(tmp_path / "x.safetensors")
    assert made is not None
    assert computed == [1, 2, 3, 4]
    (message,) = caplog.messages
    assert message.startswith(
        f"step 1 was not saved, and the run goes on: checkpoint={tmp_path / 'x.safetensors'} could"
    )
    assert "No space left on device" in message
    assert list(tmp_path.iterdir()) == []


def command(output: Path, *more: str) -> list[str]:
    chosen = ["--height", "32", "--width", "32", "--num-frames", "5", "--steps", "4", "--seed", "3", "--mesh", "single"]
    return ["generate", PROMPT, "--model", str(small_pipeline.directory()), *chosen, "-o", str(output), *more]


@pytest.mark.thorough  # by default: a killed run goes on
def test_sigterm_saves_the_running_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The signal comes as step 3 is reported; --checkpoint-every 9 would save none."""
    output, saved = tmp_path / "x.npy", tmp_path / "x.npy.checkpoint.safetensors"
    show = Display.__call__

    def terminate(display: Display, progress: Progress) -> None:
        show(display, progress)
        if progress.stage == "denoising" and progress.preview is not None and progress.done == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Display, "__call__", terminate)
    with pytest.raises(SystemExit) as ended:
        main(command(output, "--checkpoint-every", "9"))
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"comfy-tpu: stopped after step 3 of 4; the same command goes on from {saved}"
    assert [path.name for path in sorted(tmp_path.iterdir())] == [saved.name]
    monkeypatch.setattr(Display, "__call__", show)
    assert main(command(output, "--checkpoint-every", "9", "--json")) == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1] == f"comfy-tpu: resumed after step 3 of 4, from {saved}"
    assert json.loads(printed.out)["resumed_after"] == 3
    whole = torch.cat(list(small().pipeline.generate(PROMPT, small().settings)), dim=1)
    assert np.array_equal(np.load(output), (whole[0] * 255).round().byte().numpy())
    assert not saved.exists()


@pytest.mark.slow
def test_the_second_pass_has_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, upscale = tmp_path / "x.npy", ("--upscale", "2")
    assert main(command(tmp_path / "whole.npy", *upscale)) == 0
    show, second = Display.__call__, []

    def kill(display: Display, progress: Progress) -> None:
        show(display, progress)
        if progress.stage == "denoising" and progress.preview is not None and progress.size.startswith("64"):
            second.append(progress.done)
            if progress.done == 2:
                raise Killed

    monkeypatch.setattr(Display, "__call__", kill)
    with pytest.raises(Killed):
        main(command(output, *upscale, "--checkpoint-every", "1"))
    monkeypatch.setattr(Display, "__call__", show)
    capsys.readouterr()
    assert main(command(output, *upscale, "--checkpoint-every", "1")) == 0
    resumed = [line for line in capsys.readouterr().err.splitlines() if "resumed" in line]
    assert [line.partition(", from ")[2] for line in resumed] == [
        f"{output}.checkpoint.safetensors",
        f"{output}.second-pass.checkpoint.safetensors",
    ]
    assert "resumed after step 1 of" in resumed[1]
    assert output.read_bytes() == (tmp_path / "whole.npy").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["whole.npy", "x.npy"]


def test_a_signal_while_weights_are_loaded(tmp_path: Path) -> None:
    """Nothing is computed yet, and nothing waits for the step."""
    run, path = small(), tmp_path / "x.safetensors"
    run.denoise(path, kill_at=2)
    run.pipeline.running.unload()
    seen: list[str] = []
    reports: list[str] = []

    def terminate(number: int, frame: Any) -> None:
        raise Killed

    def report(progress: Progress) -> None:
        seen.append(progress.stage)
        if progress.stage == "loading" and progress.done:
            os.kill(os.getpid(), signal.SIGTERM)

    before, run.pipeline.on_progress = run.pipeline.on_progress, report
    handler = signal.signal(signal.SIGTERM, terminate)
    try:
        with pytest.raises(Killed):
            run.pipeline.denoise(
                run.embeddings, run.settings, checkpoint=StepCheckpoint(path, 1, report=reports.append)
            )
        assert signal.getsignal(signal.SIGTERM) is terminate
    finally:
        run.pipeline.on_progress = before
        signal.signal(signal.SIGTERM, handler)
    assert seen[-1] == "loading"
    assert [sentence.partition(";")[0] for sentence in reports] == [
        f"resumed after step 1 of 4, from {path}",
        "stopped after step 1 of 4",
    ]


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    """Where the main thread handles no signal: it is inside of C code for minutes."""
    code = """
import hashlib, sys, threading
from comfy_tpu.pipeline.deferred_signals import deferring
sys.setswitchinterval(1000)  # another thread runs once the main one is in C code, and not before
inside = threading.Lock()
inside.acquire()
def announce():
    inside.acquire()
    print("ready", flush=True)
threading.Thread(target=announce, daemon=True).start()
with deferring():
    inside.release()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)

        def ends() -> bool:
            """Threads may get two signals in the other order: until the first one is known, another one is it."""
            process.send_signal(signal.SIGINT)
            return process.poll() is not None

        wait_for(ends)
        assert process.returncode == 130


@pytest.mark.thorough  # by default: a killed run goes on
def test_the_python_interface(tmp_path: Path) -> None:
    pipe = comfy_tpu.open(small_pipeline.directory(), RuntimeConfig(mesh="single"))
    path = tmp_path / "x.safetensors"
    expected = pipe(PROMPT, **SMALL)
    computed = []

    def report(progress: Progress) -> None:
        if progress.stage == "denoising" and progress.preview is not None:
            computed.append(progress.done)
            if computed == [1, 2, 3]:
                raise Killed

    with pytest.raises(Killed):
        pipe(PROMPT, checkpoint=path, on_progress=report, **SMALL)
    assert path.exists()
    video = pipe(PROMPT, checkpoint=path, on_progress=report, **SMALL)
    assert computed == [1, 2, 3, 3, 4]
    assert (video.frames == expected.frames).all()
    assert not path.exists()
    with pytest.raises(InvalidValueError, match="the steps of one prompt, and there are 2; call it once for each"):
        pipe([PROMPT, PROMPT], checkpoint=path)
    with pytest.raises(InvalidValueError, match=r"checkpoint=x.mp4 is for tensors; give it a name in .safetensors"):
        pipe(PROMPT, checkpoint="x.mp4")
