"""Four processes of two devices as one: the video of one process of eight, and no half of one where a process dies."""

import functools
import json
import signal
import time

import numpy as np
import pytest

from tests.hosts.processes import find_port, start, start_all, wait_all
from tests.waiting import wait_for

COMMAND = ("-m", "comfy_tpu.cli")
PROMPT = "a red circle moves right"
SMALL = ("--num-frames", "5", "--steps", "2")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Frames by mesh, made by one process of eight devices, whose sums are XLA's own or gloo's."""
    directory = tmp_path_factory.mktemp("one")

    @functools.cache
    def frames(mesh, *, uses_gloo=False):
        output = directory / f"{mesh}-{uses_gloo}.npy"
        arguments = (*COMMAND, "generate", PROMPT, *SMALL, "--mesh", mesh, "-o", str(output))
        run = functools.partial(start_all, 1) if uses_gloo else lambda *all_, **options: [start(*all_, **options)]
        ((status, _, err),) = wait_all(run(*arguments, devices=8, cwd=directory))
        assert status == 0, err
        return np.load(output)

    return frames


def generate(mesh, cwd, *options):
    arguments = ("generate", PROMPT, *SMALL, "--mesh", mesh, "-o", "video.npy", *options)
    results = wait_all(start_all(4, *COMMAND, *arguments, cwd=cwd))
    assert [status for status, _, _ in results] == [0, 0, 0, 0], results
    # The others say nothing.
    assert [(out, err) for _, out, err in results[1:]] == [("", "")] * 3
    return results[0], np.load(cwd / "video.npy")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2,sp=4", "sp=8", "dp=2,sp=2,tp=2"])
def test_the_same_video(mesh, reference, tmp_path):
    (_, out, err), frames = generate(mesh, tmp_path, "--json")
    assert json.loads(out)["outputs"] == ["video.npy"]
    assert err.count("\n") <= 1  # the warning that an axis crosses hosts
    assert [path.name for path in tmp_path.iterdir()] == ["video.npy"]
    np.testing.assert_array_equal(frames, reference(mesh))


@pytest.mark.slow
def test_sums_of_four(reference, tmp_path):
    """In one process XLA adds the four shares of tp=4 in their order; gloo's ring, which connects several, begins each
    quarter of an array with another share. With gloo in one process, too, the video is the same; sums of two shares are
    the same in any order (dp=2,sp=2,tp=2 above)."""
    _, frames = generate("dp=2,tp=4", tmp_path)
    np.testing.assert_array_equal(frames, reference("dp=2,tp=4", uses_gloo=True))
    difference = np.abs(frames.astype(int) - reference("dp=2,tp=4").astype(int))
    assert difference.max() <= 1
    assert (difference > 0).mean() < 0.002


@pytest.mark.slow
def test_stages(reference, tmp_path):
    """Artifacts are on the first host only; the prompt is read from its standard input."""
    places = [tmp_path / str(number) for number in range(4)]
    for place in places:
        place.mkdir()

    def run(*arguments, prompt=""):
        port = find_port()
        processes = [
            start(
                *COMMAND,
                *arguments,
                *("--coordinator", f"localhost:{port}", "--num-processes", "4", "--process-id", str(number)),
                cwd=place,
            )
            for number, place in enumerate(places)
        ]
        processes[0].stdin.write(prompt)
        for process in processes:
            process.stdin.close()
            process.stdin = None
        results = wait_all(processes)
        assert [status for status, _, _ in results] == [0, 0, 0, 0], results
        return results

    mesh = ("--mesh", "dp=2,sp=4")
    run("encode", "-", *SMALL, *mesh, prompt=PROMPT)
    run("denoise", "text.safetensors", *mesh)
    (_, _, err), *_ = run("denoise", "text.safetensors", *mesh)
    assert "latents.safetensors is there already" in err
    run("decode", "latents.safetensors", "-o", "video.npy", *mesh)
    np.testing.assert_array_equal(np.load(places[0] / "video.npy"), reference("dp=2,sp=4"))
    assert sorted(path.name for path in places[0].iterdir()) == [
        "latents.safetensors",
        "text.safetensors",
        "video.npy",
    ]
    assert [list(place.iterdir()) for place in places[1:]] == [[], [], []]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "number"),
    [(3, signal.SIGKILL), (0, signal.SIGKILL), (2, signal.SIGTERM), (1, signal.SIGINT), (0, signal.SIGINT)],
)
def test_end_of_one_ends_all(victim, number, tmp_path):
    """While the first host writes the video: its partial file is there."""
    arguments = ("generate", PROMPT, "--num-frames", "161", "--steps", "1", "--mesh", "dp=2,sp=4", "-o", "out/x.npy")
    processes = start_all(4, *COMMAND, *arguments, cwd=tmp_path)
    out = tmp_path / "out"
    wait_for(lambda: (out.is_dir() and any(out.iterdir())) or processes[0].poll() is not None)
    assert [process.poll() for process in processes] == [None] * 4, wait_all(processes)
    processes[victim].send_signal(number)
    began = time.monotonic()
    results = wait_all(processes, 60)
    assert time.monotonic() - began < 60
    for index, (status, printed, err) in enumerate(results):
        assert printed == ""
        if index != victim:
            assert status == 1
            last = err.splitlines()[-1]
            assert last.startswith(f"comfy-tpu: process {victim} of 4 (")
            assert sum("process" in line for line in err.splitlines()) == 1
    left = [path.name for path in out.iterdir()] if out.exists() else []
    if number == signal.SIGKILL and victim == 0:  # nobody was there to remove it; the next run does
        assert all(name.endswith(".partial") for name in left)
    else:
        assert left == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--mesh", "sp=16"), "--mesh dp=1,sp=16,tp=1 needs 16 devices but there are 8; choose sizes whose product is"),
        (("--mesh", "sp=4"), "--mesh dp=1,sp=4,tp=1 has 4 devices, but 4 hosts have 8, and each of them must have"),
        (("--height", "99"), "--height 99"),
    ],
)
def test_bad_input_ends_all(options, sentence, tmp_path):
    results = wait_all(start_all(4, *COMMAND, "generate", PROMPT, *options, "-o", "x.npy", cwd=tmp_path))
    assert [status for status, _, _ in results] == [1, 1, 1, 1]
    for _, printed, err in results:
        assert printed == ""
        assert len([line for line in err.splitlines() if line.startswith("comfy-tpu: ")]) == 1
    assert any(err.startswith(f"comfy-tpu: {sentence}") for _, _, err in results)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (("generate", "x", "--coordinator", "h:1"), 1, "--num-processes is missing; give --coordinator"),
        (
            ("generate", "x", "--coordinator", "h:1", "--num-processes", "2", "--process-id", "2"),
            1,
            "--process-id 2 is not in 0 to 1, the numbers of 2 processes; give each host its own",
        ),
        (("generate", "x", "--coord", "h:1"), 1, "--coordinator is abbreviated; write --coordinator in full"),
        (("plan", "wan", "--coordinator", "h:1"), 2, "unrecognized arguments: --coordinator"),
    ],
)
def test_bad_flags(arguments, status, sentence, tmp_path):
    ((found, _, err),) = wait_all([start(*COMMAND, *arguments, cwd=tmp_path)])
    assert found == status
    assert sentence in err
    assert "Traceback" not in err


def test_different_options(tmp_path):
    """Found before jax is started."""
    port = find_port()
    join = ("--coordinator", f"localhost:{port}", "--num-processes", "2", "--process-id")
    processes = [
        start(*COMMAND, "generate", "x", "--mesh", mesh, *join, str(number), cwd=tmp_path)
        for number, mesh in enumerate(("sp=8", "dp=8"))
    ]
    results = wait_all(processes)
    assert [status for status, _, _ in results] == [1, 1]
    sentence = "mesh is sp=8 on process 0, but dp=8 on process 1; start all hosts with the same model and options"
    assert results[0][2].strip() == "comfy-tpu: --" + sentence
    assert results[1][2].strip().endswith(sentence)


@pytest.mark.slow
def test_the_doctor_tells_of_all_hosts(tmp_path):
    results = wait_all(start_all(2, *COMMAND, "doctor", "--json", cwd=tmp_path))
    assert [out for _, out, _ in results[1:]] == [""]
    document = json.loads(results[0][1])
    found = [(host["process"], host["platform"], host["devices"]) for host in document["hosts"]]
    assert found == [(0, "cpu", 2), (1, "cpu", 2)]
    (finding,) = [each for each in document["findings"] if each["name"] == "hosts"]
    assert "together 4 devices" in finding["detail"]
