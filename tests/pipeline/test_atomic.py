"""Files that are replaced as a whole: what is refused, and what a killed run leaves."""

import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import ComfyTpuError, InvalidValueError
from comfy_tpu.pipeline import atomic, media, partial_files

ROOT = Path(__file__).parents[2]
SETTINGS = GenerationSettings(height=48, width=64, num_frames=9)
FRAMES = re.compile(r"f\d\.png")


def make_device(path: Path) -> None:
    """A null device. As root only one of our own: a mistake would replace it."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        if os.geteuid() == 0:
            pytest.skip("devices cannot be made here, and as root the machine's own is not risked")
        path.symlink_to("/dev/null")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))  # an address has 107 bytes at most


SPECIAL = {
    "a named pipe": os.mkfifo,
    "a socket": make_socket,
    "a character device": make_device,
}


@pytest.mark.parametrize("through_link", [False, True], ids=["itself", "link"])
@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_file_is_refused_and_stays(kind: str, through_link: bool, tmp_path: Path) -> None:
    special = path = tmp_path / "x.npy"
    if through_link:
        special = tmp_path / "special"
        path.symlink_to(special)
    SPECIAL[kind](special)
    text = f"output={path} is .*{kind}, expected a file; choose another name"
    with pytest.raises(InvalidValueError, match=text):
        media.check_output(path, SETTINGS)
    with pytest.raises(InvalidValueError, match=text), atomic.replacing(path):
        pytest.fail("there is nothing to write to")
    assert not special.is_file()
    assert path.is_symlink() == through_link
    assert {entry.name for entry in tmp_path.iterdir()} == {special.name, path.name}


def test_special_files_are_not_read_as_videos(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.mp4")  # opening it would wait for ever
    assert media.find_metadata(tmp_path / "x.mp4") == {}


@pytest.mark.parametrize("output", ["x.npy", "out/x.npy", "out/", "x%d.png"])
def test_no_directories_are_made_at_the_end_of_a_link(output: str, tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere" / "deep")
    (tmp_path / "x.npy").symlink_to(tmp_path / "elsewhere" / "x.npy")
    path = f"{tmp_path}/{output}"
    if output == "x%d.png":
        path = f"{tmp_path}/out/{output}"
    text = f"^output={tmp_path}/.* a link to {tmp_path}/elsewhere/.*; create it, or remove the link$"
    with pytest.raises(InvalidValueError, match=text):
        media.check_output(path, SETTINGS)
    with pytest.raises(InvalidValueError, match=text), media.open_writer(path, fps=8, metadata={}) as writer:
        writer.write(torch.zeros(1, 4, 4, 3))
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x\0.mp4", "output='x\\x00.mp4' holds a null character; choose another name"),
        ("x\ud800.mp4", "output='x\\ud800.mp4' holds '\\ud800', which is half a character; choose another name"),
        ("x" * 300, "is too long: 300 bytes in one part"),
    ],
)
def test_names_that_no_file_system_holds(name: str, text: str) -> None:
    with pytest.raises(InvalidValueError, match=re.escape(text)):
        atomic.check_name(Path(name))
    atomic.check_name(Path("x\udcff.mp4"))  # a byte that is not UTF-8 is one


def test_links_in_a_circle(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    path.symlink_to(path)
    with pytest.raises(InvalidValueError, match="x.npy is a link in a circle of links; remove it"):
        media.check_output(path, SETTINGS)


def test_the_file_that_standard_output_goes_to(tmp_path: Path) -> None:
    """`comfy-tpu … -o x.npy > x.npy`, and `-o /dev/stdout > x`: what is printed would be lost."""
    code = (
        "import sys; from pathlib import Path; from comfy_tpu.pipeline import atomic; atomic.check_place(Path('x.npy'))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with (tmp_path / "x.npy").open("w") as output:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, cwd=tmp_path, stdout=output, stderr=subprocess.PIPE, text=True)
    assert "output=x.npy is the file that standard output goes to; choose another name" in done.stderr


@pytest.mark.parametrize("entry", ["frame_0002.png", "frame_0007.png"])
def test_a_frame_that_is_a_directory_is_refused_and_stays(entry: str, tmp_path: Path) -> None:
    (tmp_path / entry).mkdir()
    (tmp_path / entry / "mine").touch()
    text = f"output={tmp_path} has a directory where a frame would go, {entry}; move it away, or choose another place"
    with pytest.raises(InvalidValueError, match=text):
        media.check_output(f"{tmp_path}/", SETTINGS)
    with pytest.raises(InvalidValueError, match=text), media.open_writer(f"{tmp_path}/", fps=8, metadata={}) as writer:
        writer.write(torch.zeros(3, 4, 4, 3))
    assert [path.name for path in tmp_path.rglob("*")] == [entry, "mine"]


def read_files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if not path.name.startswith(".")}


@pytest.mark.parametrize("prompts", [("old", "new"), ("same", "same")], ids=["another video", "the same again"])
def test_a_killed_run_never_leaves_frames_of_two_videos_as_one(prompts: tuple[str, str], tmp_path: Path) -> None:
    def write(directory: Path, frames: torch.Tensor, prompt: str) -> None:
        with media.open_writer(f"{directory}/", fps=8, metadata={"prompt": prompt}) as writer:
            writer.write(frames)

    old, new, results = (tmp_path / name for name in ("old", "new", "results"))
    write(old, torch.zeros(4, 4, 4, 3), prompts[0])
    write(new, torch.ones(3, 4, 4, 3), prompts[1])
    complete = {"old": read_files(old), "new": read_files(new)}
    command = [sys.executable, Path(__file__).with_name("killed_sequences.py"), old, new, results]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, check=True)
    seen = set()
    for step in range(1, 1 + len(list(results.iterdir()))):
        directory = results / str(step)
        found = next((name for name, files in complete.items() if files == read_files(directory)), "mixed")
        metadata = [media.find_metadata(directory / "frame_%04d.png", count) for count in (4, 3)]
        if found == "mixed":
            assert metadata == [{}, {}], step
            assert not (directory / "frame_0000.png").exists(), step  # by which others may tell
        seen.add(found)
        write(directory, torch.ones(3, 4, 4, 3), prompts[1])
        assert read_files(directory) == complete["new"]
        assert media.find_metadata(directory / "frame_%04d.png", 3) == {"prompt": prompts[1]}
        assert partials(directory) == []
    assert seen == {"old", "mixed", "new"}
    assert found == "new"  # the last one was not killed


def test_a_sequence_that_cannot_be_moved_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("f0.png", "f1.png", "f2.png"):
        (tmp_path / name).write_text(f"old {name}")
    replace, moves = Path.replace, []

    def fail_at_the_fifth(source: Path, target: Path) -> Path:
        moves.append(source)
        if len(moves) == 5:
            raise OSError(5, "Input/output error")
        return replace(source, target)

    monkeypatch.setattr(Path, "replace", fail_at_the_fifth)

    def write() -> None:
        with atomic.replacing_sequence(tmp_path, FRAMES) as partial:
            for name in ("f0.png", "f1.png"):
                (partial / name).write_text("new")

    with pytest.raises(ComfyTpuError, match="could not be written: Input/output error; nothing of it was kept"):
        write()
    assert len(moves) == 5 + 4  # three old ones went, one new one came, one failed; the four came back
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        name: f"old {name}" for name in ("f0.png", "f1.png", "f2.png")
    }


# Writes one file, one sequence, says so, and waits.
WRITING = """
import sys, threading
from pathlib import Path
from comfy_tpu.pipeline import atomic
import re
place = Path(sys.argv[1])
with atomic.replacing(place / "x.npy") as file, atomic.replacing_sequence(place, re.compile("f[0-9]")) as directory:
    file.write_text("half")
    (directory / "f0").write_text("half")
    print("ready", flush=True)
    threading.Event().wait()
"""


@pytest.fixture
def writing(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process in the middle of writing to tmp_path."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", WRITING, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def partials(directory: Path) -> list[Path]:
    return sorted(directory.glob(".comfy-tpu-*.partial"))


def test_partial_files_of_a_killed_run_are_removed_by_the_next(
    writing: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    assert len(partials(tmp_path)) == 2
    assert all(f"-{os.uname().nodename}-{writing.pid}-" in path.name for path in partials(tmp_path))
    with atomic.replacing(tmp_path / "y.npy") as partial:
        partial.write_text("whole")
    assert len(partials(tmp_path)) == 2  # its process is there
    writing.send_signal(signal.SIGKILL)
    writing.wait()
    assert len(partials(tmp_path)) == 2
    with atomic.replacing(tmp_path / "y.npy") as partial:
        partial.write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["y.npy"]


def test_partial_files_of_others_stay(writing: "subprocess.Popen[str]", tmp_path: Path) -> None:
    """Of another machine: whether its process is there cannot be seen from here. Of a killed one here, for contrast."""
    writing.send_signal(signal.SIGKILL)
    writing.wait()
    ours = partials(tmp_path)
    host = os.uname().nodename
    others = [
        path.with_name(path.name.replace(f"-{host}-", f"-{other}-")) for path in ours for other in ("b", f"{host}-1")
    ]
    for path in others:
        path.touch()
    others.append(tmp_path / ".comfy-tpu-notes.partial")
    others[-1].touch()
    partial_files.remove_abandoned(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_a_large_directory_is_not_listed_at_every_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Path] = []

    def look(directory: Path) -> int:
        looks.append(directory)
        return 10_000

    monkeypatch.setattr(partial_files, "_remove_abandoned", look)
    for name in "abc":
        with atomic.replacing(tmp_path / name) as partial:
            partial.write_text(name)
    assert looks == [tmp_path]
    monkeypatch.setitem(partial_files._look_at, tmp_path, 0.0)  # some seconds later
    with atomic.replacing(tmp_path / "d") as partial:
        partial.write_text("d")
    assert looks == [tmp_path] * 2


def test_writers_of_one_process_keep_each_others_partial_files(tmp_path: Path) -> None:
    with atomic.replacing(tmp_path / "x") as first, atomic.replacing(tmp_path / "y") as second:
        first.write_text("x")
        second.write_text("y")
    assert [(tmp_path / name).read_text() for name in "xy"] == ["x", "y"]


def test_where_nothing_can_be_locked_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(lock: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    abandoned = tmp_path / f"{partial_files._prefix()}1-00000000.partial"
    abandoned.touch()
    monkeypatch.setattr(partial_files.fcntl, "flock", fail)
    with atomic.replacing(tmp_path / "x") as partial:
        partial.write_text("x")
    assert sorted(path.name for path in tmp_path.iterdir()) == [abandoned.name, "x"]


def test_a_partial_file_that_another_run_removes_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, seen = partial_files.fcntl.flock, []

    def remove_the_first(lock: int, operation: int) -> None:
        (path,) = partials(tmp_path)
        seen.append(path)
        if len(seen) == 1:
            path.rmdir() if path.is_dir() else path.unlink()
        flock(lock, operation)

    monkeypatch.setattr(partial_files.fcntl, "flock", remove_the_first)
    for is_directory in (False, True):
        seen.clear()
        with partial_files.open_partial(tmp_path, is_directory=is_directory) as partial:
            assert seen == [seen[0], partial]
            assert partial.is_dir() == is_directory
            partial.rmdir() if is_directory else partial.unlink()


@pytest.mark.parametrize("is_directory", [False, True])
def test_a_process_that_ends_without_leaving_its_blocks_removes_its_partial_files(is_directory, tmp_path):
    with partial_files.open_partial(tmp_path, is_directory=is_directory) as partial:
        assert partial.exists()
        partial_files.remove_own()
        assert list(tmp_path.iterdir()) == []
    (tmp_path / "x").touch()
    partial_files.remove_own()
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
