"""--checkpoint-every in real processes that are killed and terminated, alone and on several hosts."""

import functools
import signal
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.hosts.processes import find_port, start, wait_all

PROMPT = "a red circle moves right"
SMALL = ("--num-frames", "5", "--steps", "8")
COMMAND = ("-m", "comfy_tpu.cli")
KILLED = str(Path(__file__).with_name("killed_command.py"))


def run(directory, *arguments, kill=""):
    command = (KILLED,) if kill else COMMAND
    ((status, out, err),) = wait_all([start(*command, *arguments, devices=1, cwd=directory, KILL=kill)])
    return status, out, err


def load(path):
    with safe_open(path, framework="np") as file:
        return file.metadata(), {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The video by scheduler."""
    directory = tmp_path_factory.mktemp("undisturbed")

    @functools.cache
    def video(*options):
        status, _, err = run(directory, "generate", PROMPT, *SMALL, *options, "-o", "x.mp4")
        assert status == 0, err
        return (directory / "x.mp4").read_bytes()

    return video


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "step", "options"),
    [
        (signal.SIGKILL, 2, ("--reuse", "0.2")),
        (signal.SIGKILL, 6, ("--scheduler", "dpm++")),
        (signal.SIGTERM, 1, ("--reuse", "0.2")),
        (signal.SIGTERM, 5, ("--scheduler", "dpm++")),
        (signal.SIGTERM, 8, ("--reuse", "0.2")),
    ],
)
def test_an_ended_process_goes_on(number, step, options, undisturbed, tmp_path):
    """A kill comes before the step is saved, and SIGTERM waits for that."""
    arguments = ("generate", PROMPT, *SMALL, *options, "--checkpoint-every", "1", "-o", "x.mp4")
    saved = tmp_path / "x.mp4.checkpoint.safetensors"
    status, out, err = run(tmp_path, *arguments, kill=f"{step} {int(number)}")
    done = step if number == signal.SIGTERM else step - 1
    if number == signal.SIGTERM:
        assert (status, out) == (143, "")
        assert err == f"comfy-tpu: stopped after step {done} of 8; the same command goes on from {saved.name}\n"
    else:
        assert (status, out, err) == (-number, "", "")
    assert [path.name for path in tmp_path.iterdir()] == [saved.name]
    status, out, err = run(tmp_path, *arguments)
    assert (status, out) == (0, "x.mp4\n"), err
    assert err == f"comfy-tpu: resumed after step {done} of 8, from {saved.name}\n"
    assert (tmp_path / "x.mp4").read_bytes() == undisturbed(*options)
    assert [path.name for path in tmp_path.iterdir()] == ["x.mp4"]


@pytest.mark.slow
def test_the_stage(tmp_path):
    """denoise, whose output has a name of its own."""
    assert run(tmp_path, "encode", PROMPT, *SMALL)[0] == 0
    assert run(tmp_path, "denoise", "text.safetensors", "-o", "whole.safetensors")[0] == 0
    again = ("denoise", "text.safetensors", "--checkpoint-every", "3")
    assert run(tmp_path, *again, kill=f"5 {int(signal.SIGKILL)}")[0] == -signal.SIGKILL
    status, _, err = run(tmp_path, *again)
    saved = tmp_path / "latents.safetensors.checkpoint.safetensors"
    assert (status, err) == (0, f"comfy-tpu: resumed after step 3 of 8, from {saved.name}\n")
    # Not their bytes: safetensors writes metadata in any order.
    assert load(tmp_path / "latents.safetensors") == load(tmp_path / "whole.safetensors")
    assert not saved.exists()


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "number"), [(0, signal.SIGKILL), (1, signal.SIGTERM)])
def test_several_hosts(victim, number, tmp_path):
    """The first host saves, and sends what it reads to the others, which have no such file."""
    places = [tmp_path / "0", tmp_path / "1"]
    options = ("generate", PROMPT, *SMALL, "--mesh", "dp=2,sp=2")
    for place in places:
        place.mkdir()

    def begin(command, *arguments, kill=""):
        port = find_port()
        join = ("--coordinator", f"localhost:{port}", "--num-processes", "2", "--process-id")
        return [start(*command, *arguments, *join, str(at), cwd=place, KILL=kill) for at, place in enumerate(places)]

    results = wait_all(begin(COMMAND, *options, "-o", "whole.npy"))
    assert [status for status, _, _ in results] == [0, 0], results
    arguments = (*options, "--checkpoint-every", "2", "-o", "x.npy")
    wait_all(begin((KILLED,), *arguments, kill=f"5 {int(number)} {victim}"))
    saved = places[0] / "x.npy.checkpoint.safetensors"
    with safe_open(saved, framework="np") as file:
        done = int(file.metadata()["done"])
    assert done in (4, 6)  # one more step may be computed before the signal ends all
    results = wait_all(begin(COMMAND, *arguments))
    assert [status for status, _, _ in results] == [0, 0], results
    assert f"comfy-tpu: resumed after step {done} of 8, from {saved.name}\n" in results[0][2]
    assert results[1][1:] == ("", "")
    assert (places[0] / "x.npy").read_bytes() == (places[0] / "whole.npy").read_bytes()
    assert sorted(path.name for path in places[0].iterdir()) == ["whole.npy", "x.npy"]
    assert list(places[1].iterdir()) == []
