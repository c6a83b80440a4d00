"""Job files of every kind; a line that cannot be read is named, and the others are read."""

import io
import tracemalloc
from pathlib import Path

import pytest

from comfy_tpu.errors import InvalidValueError
from comfy_tpu.jobs.sources import LINE_MAX, InvalidLine, Line, open_jobs, read_jobs


def read(text: str | bytes, kind: str | None = None) -> list[Line | InvalidLine]:
    return list(read_jobs(io.BytesIO(text.encode() if isinstance(text, str) else text), kind))


def test_prompts() -> None:
    assert read("a cat\n\n  a dog \r\n# not a comment\n", "text") == [
        Line(1, {"prompt": "a cat"}),
        Line(3, {"prompt": "a dog"}),
        Line(4, {"prompt": "# not a comment"}),
    ]


def test_json_lines() -> None:
    found = read('\ufeff{"prompt": "a cat", "seed": 7}\nnot json\n\n[1]\n{"prompt": "é"}')
    assert found[0] == Line(1, {"prompt": "a cat", "seed": 7})
    assert [(type(each), each.number) for each in found[1:]] == [(InvalidLine, 2), (InvalidLine, 4), (Line, 5)]


@pytest.mark.parametrize(
    ("text", "expected"), [('\n{"prompt": "x"}', "x"), ("\na {strange} prompt", "a {strange} prompt")]
)
def test_standard_input_tells_its_kind_by_its_first_line(text: str, expected: str) -> None:
    assert read(text) == [Line(2, {"prompt": expected})]


def test_csv() -> None:
    text = 'prompt,seed,size\n"a cat, ""striped""",7,\n\na dog,8,480P\ntoo,many,cells,here\n"two\nlines",9,\nlast,1\n'
    assert read(text, "csv") == [
        Line(2, {"prompt": 'a cat, "striped"', "seed": "7"}),
        Line(4, {"prompt": "a dog", "seed": "8", "size": "480P"}),
        InvalidLine(5, "has 4 cells and the header 3"),
        Line(6, {"prompt": "two\nlines", "seed": "9"}),
        Line(8, {"prompt": "last", "seed": "1"}),
    ]


def test_quotes_in_csv() -> None:
    """Inside of a cell a quote is a letter; one that begins a cell has to end."""
    assert read('prompt,seed\nfive 5" nails,1\na cat,2\na 3" screw,3\n', "csv") == [
        Line(2, {"prompt": 'five 5" nails', "seed": "1"}),
        Line(3, {"prompt": "a cat", "seed": "2"}),
        Line(4, {"prompt": 'a 3" screw', "seed": "3"}),
    ]
    assert read('prompt,seed\na dog,1\n"a cat,2\na bird,3\n', "csv") == [
        Line(2, {"prompt": "a dog", "seed": "1"}),
        InvalidLine(3, "has a quote that does not end, or ends in line 4"),
    ]
    assert read(b'prompt\n"a\n\xff\nb"\nlast\n', "csv") == [
        InvalidLine(3, "is not UTF-8 text (invalid start byte)"),
        InvalidLine(2, "has a quote that does not end, or ends in line 4"),
        Line(5, {"prompt": "last"}),
    ]


def test_csv_without_a_prompt() -> None:
    with pytest.raises(InvalidValueError, match="columns seed, size, and no prompt"):
        read("seed,size\n7,480P", "csv")


def test_what_is_no_text() -> None:
    found = read(b"a cat\n\xff\xfe\n" + b"x" * (LINE_MAX + 5) + b"\na dog\n", "text")
    assert [each.number for each in found] == [1, 2, 3, 4]
    assert isinstance(found[1], InvalidLine)
    assert isinstance(found[2], InvalidLine)
    assert found[3] == Line(4, {"prompt": "a dog"})


@pytest.mark.parametrize("name", ["missing.txt", ".", "nowhere://x/y.txt"])
def test_what_cannot_be_opened(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidValueError, match="^jobs=") as error, open_jobs(name):
        pass
    assert error.value.field == "jobs"


def test_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="choose from jsonl, csv, text"), open_jobs("x", "xml"):
        pass


def test_an_address(tmp_path: Path) -> None:
    import fsspec

    with fsspec.open("memory://test-sources/jobs.txt", "wb") as file:
        file.write(b"a cat\na dog\n")
    with open_jobs("memory://test-sources/jobs.txt") as lines:
        assert [line.number for line in lines] == [1, 2]


def test_a_long_file_is_not_held(tmp_path: Path) -> None:
    path = tmp_path / "jobs.txt"
    path.write_text("a prompt of some length, as people write them\n" * 50_000)
    tracemalloc.start()
    try:
        with open_jobs(str(path)) as lines:
            count = sum(1 for _ in lines)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 50_000
    assert peak < path.stat().st_size / 4
