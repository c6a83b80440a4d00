"""The real command with the demo model, in processes of its own."""

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comfy_tpu.cli.main import main
from tests.pipeline import small_pipeline

ROOT = Path(__file__).parents[2]

# Counts what is compiled around the command itself: the loader's small programs and all.
COUNTING = """
import json, sys
from comfy_tpu.cli.main import main
from comfy_tpu.compiler.cache import count_compilations
with count_compilations() as count:
    status = main(sys.argv[1:])
print(json.dumps({"requested": count.requested, "compiled": count.compiled}), file=sys.stderr)
sys.exit(status)
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src")}


@pytest.mark.slow  # tests/cli/test_cache.py holds more, of stored programs
def test_a_second_process_compiles_nothing_and_makes_the_same_video(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "a red circle moving left", "--steps", "2", "--mesh", "single", "--json", "-o"]
    assert main([*words, str(tmp_path / "a.npy")]) == 0
    assert json.loads(capsys.readouterr().out)["outputs"] == [str(tmp_path / "a.npy")]
    flags = ("--verbose", "--profile", str(tmp_path / "traces"), "--dump", str(tmp_path / "programs"))
    done = subprocess.run(
        [sys.executable, "-c", COUNTING, *words, str(tmp_path / "b.npy"), *flags],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    count = json.loads(done.stderr.splitlines()[-1])
    assert count["requested"] > 0
    assert count["compiled"] == 0
    report = json.loads(done.stdout)
    assert report["programs"]
    assert all(program["from_cache"] for program in report["programs"])
    one, other = (np.load(tmp_path / name) for name in ("a.npy", "b.npy"))
    assert one.shape == (17, 64, 64, 3)
    assert (one == other).all()
    check_debugging(tmp_path, report, done.stderr)


def check_debugging(tmp_path: Path, report: dict[str, Any], said: str) -> None:
    """Of a run whose programs all came from the cache."""
    (trace,) = tmp_path.glob("traces/plugins/profile/*/perfetto_trace.json.gz")
    names = [event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]]
    assert names.count("denoising step") == 2
    assert names.count("decode latent frame") == 5
    assert {"load transformer", "compile transformer.denoise_step", "encode prompt with text_encoder"} <= set(names)
    texts = sorted(path.name for path in (tmp_path / "programs").iterdir())
    assert len(texts) == 3 * len(report["programs"])
    assert {name.partition("-")[0] for name in texts} == {
        program["what"].partition(" at ")[0] for program in report["programs"]
    }
    assert {name.split(".", 2)[2] for name in texts if "denoise_step-64x64x17-" in name} == {
        name.split(".", 2)[2] for name in texts if name.startswith("transformer.denoise_step")
    }
    for component in ("text_encoder", "transformer", "vae"):
        assert f"comfy-tpu: demo {component} is loaded; mesh dp=1,sp=1,tp=1: " in said


@pytest.mark.slow  # by default in test_generate.py, with a pipeline that computes nothing
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_denoising_ends_it_and_leaves_nothing(tmp_path: Path, number: int, status: int) -> None:
    # Steps enough to last for hours; the first "denoising" on the terminal says that it is time.
    words = ["generate", "a red circle", "--steps", "1000", "--mesh", "single", "-o", str(tmp_path / "out" / "x.mp4")]
    leader, follower = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "comfy_tpu.cli", *words],
        env=environment(),
        stderr=follower,
        stdout=subprocess.DEVNULL,
    )
    os.close(follower)
    heard = b""
    while b"denoising" not in heard:
        heard += os.read(leader, 4096)
    process.send_signal(number)
    drain = subprocess.Popen(["cat"], stdin=leader, stdout=subprocess.PIPE)
    os.close(leader)
    rest, _ = drain.communicate()
    assert process.wait() == status, (heard + rest).decode()
    assert b"Traceback" not in heard + rest
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.mark.thorough  # by default: the stages of a pipeline, tests/pipeline/test_video.py
def test_the_stages_are_the_whole_and_a_finished_one_is_not_done_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["--model", str(small_pipeline.directory()), "--height", "32", "--width", "32", "--num-frames", "5"]
    chosen += ["--steps", "2", "--seed", "3", "--mesh", "single"]
    whole, parts = tmp_path / "whole.npy", tmp_path / "parts.npy"
    text, latents = str(tmp_path / "text.safetensors"), str(tmp_path / "latents.safetensors")
    assert main(["generate", "a red circle moving left", *chosen, "-o", str(whole)]) == 0
    assert main(["encode", "a red circle moving left", *chosen, "-o", text]) == 0
    assert main(["denoise", text, "--mesh", "single", "-o", latents]) == 0
    assert main(["decode", latents, "--mesh", "single", "-o", str(parts)]) == 0
    assert whole.read_bytes() == parts.read_bytes()
    made = Path(latents).stat().st_mtime_ns
    capsys.readouterr()
    assert main(["denoise", text, "--mesh", "single", "-o", latents]) == 0
    assert "is there already" in capsys.readouterr().err
    assert Path(latents).stat().st_mtime_ns == made
    # In another precision it is something else.
    assert main(["denoise", text, "--mesh", "single", "--dtype", "bfloat16", "-o", latents]) == 0
    assert "is there already" not in capsys.readouterr().err
    assert Path(latents).stat().st_mtime_ns != made
