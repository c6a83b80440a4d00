from pathlib import Path

import pytest

from comfy_tpu.errors import InvalidValueError
from comfy_tpu.pipeline.path_conflicts import check_conflicts

SAME = {
    "the same name": ("x.png", "x.png"),
    "another spelling": ("x.png", "sub/../x.png"),
    "a file that is there": ("there.png", "./there.png"),
    "a link": ("there.png", "link.png"),
    "a link to nothing": ("missing.png", "dangling.png"),
    "a linked directory": ("sub/x.png", "linked/x.png"),
    "a hard link": ("there.png", "hard.png"),
    "a frame": ("f%d.png", "f7.png"),
    "a frame in a linked directory": ("sub/f%02d.png", "linked/f07.png"),
    "a link to a frame": ("sub/f%d.png", "frame.png"),
    "a link among the frames": ("sub/f%d.png", "sub/f9.png"),
    "a sequence": ("sub/f%d.png", "linked/f%d.png"),
}

DIFFERENT = {
    "another name": ("x.png", "y.png"),
    "another directory": ("x.png", "sub/x.png"),
    "no number": ("f%d.png", "fx.png"),
    "fewer digits": ("f%04d.png", "f007.png"),
    "frames elsewhere": ("sub/f%d.png", "f7.png"),
    "another sequence": ("f%d.png", "g%d.png"),
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "linked").symlink_to("sub")
    (tmp_path / "there.png").touch()
    (tmp_path / "link.png").symlink_to("there.png")
    (tmp_path / "hard.png").hardlink_to(tmp_path / "there.png")
    (tmp_path / "dangling.png").symlink_to("missing.png")
    (tmp_path / "sub" / "f8.png").touch()
    (tmp_path / "frame.png").symlink_to("sub/f8.png")
    (tmp_path / "sub" / "f9.png").symlink_to("../there.png")
    return tmp_path


@pytest.mark.parametrize("names", SAME.values(), ids=SAME)
def test_one_file_for_two_things(names: tuple[str, str], place: Path) -> None:
    one, other = (place / name for name in names)
    for first, second in ((one, other), (other, one)):
        with pytest.raises(InvalidValueError) as raised:
            check_conflicts([("output", first), ("contact_sheet", second)])
        assert str(raised.value) == (
            f"contact_sheet={second} is the same file as {first}, which is written too; choose another name"
        )
        with pytest.raises(InvalidValueError) as raised:
            check_conflicts([("output", first)], [second])
        assert str(raised.value) == (
            f"output={first} would replace {second}, which is an input of this run; choose another name"
        )


@pytest.mark.parametrize("names", DIFFERENT.values(), ids=DIFFERENT)
def test_files_of_their_own(names: tuple[str, str], place: Path) -> None:
    one, other = (place / name for name in names)
    for first, second in ((one, other), (other, one)):
        check_conflicts([("output", first), ("contact_sheet", second)], [place / "there.png"])
        check_conflicts([("output", first)], [second])


@pytest.mark.parametrize("output", ["sub/f%d.png", "linked/f8.png", "sub/./f9.png"])
def test_the_files_of_a_directory_are_inputs(output: str, place: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"would replace .*/sub/f[89]\.png, which is an input of this run"):
        check_conflicts([("output", place / output)], [place / "sub"])
    check_conflicts([("output", place / "sub" / "g%d.png"), ("preview", place / "sub" / "x.png")], [place / "sub"])
