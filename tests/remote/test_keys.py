"""Addresses, and keys that go nowhere else."""

from pathlib import Path

import pytest

from comfy_tpu.errors import InvalidValueError
from comfy_tpu.remote.keys import VARIABLE, find_key, parse_address


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        (" https://TPU.example.org/ ", "https://tpu.example.org"),
        ("https://example.org/tpu/", "https://example.org/tpu"),
        ("http://[::1]:9", "http://[::1]:9"),
        ("http://host:80", "http://host"),
    ],
)
def test_addresses(text: str, shown: str) -> None:
    assert str(parse_address(text)) == shown


@pytest.mark.parametrize(
    "text",
    [
        *("", "host:8000", "ftp://host", "file:///etc/passwd", "http://", "http://host:0", "http://host:99999"),
        *("http://ho st", "http://host\r\nX: y", "http://user:secret-key@host", "http://host?key=secret-key"),
        "http://host#secret-key",
    ],
)
def test_other_addresses_are_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(InvalidValueError, match="address") as caught:
        parse_address(text)
    assert "secret" not in str(caught.value)


def test_a_key_belongs_to_one_address(tmp_path: Path) -> None:
    """A workflow of somebody else's names the address: it must not get the key of another."""
    environment = {VARIABLE: "https://tpu.example.org=key-of-tpu, http://lab:8000=key=of=lab"}
    for text, key in (
        ("https://tpu.example.org", "key-of-tpu"),
        ("https://TPU.example.org/behind/a/proxy", "key-of-tpu"),
        ("http://lab:8000", "key=of=lab"),
        ("http://tpu.example.org", None),  # not encrypted
        ("https://tpu.example.org:444", None),
        ("https://tpu.example.org.evil.com", None),
        ("http://lab:8001", None),
    ):
        assert find_key(parse_address(text), environment) == key, text
    assert find_key(parse_address("http://lab:8000"), {}) is None


def test_keys_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    file.write_text("# of the lab\n\nhttp://lab:8000 = from-the-file\n")
    address = parse_address("http://lab:8000")
    assert find_key(address, {}, file) == "from-the-file"
    assert find_key(address, {VARIABLE: "http://lab:8000=from-the-variable"}, file) == "from-the-variable"
    assert find_key(address, {}, tmp_path / "none.txt") is None


@pytest.mark.parametrize(
    "line", ["secret-key", "http://lab:8000=", "lab=secret-key", "http://lab=secret key", "http://x=secr\x00et"]
)
def test_a_line_that_is_none_is_named_and_not_repeated(line: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    file.write_text(f"# keys\n{line}\n")
    with pytest.raises(InvalidValueError, match=r"entry 2 of .* is not ADDRESS=KEY") as caught:
        find_key(parse_address("http://lab:8000"), {}, file)
    assert "secret" not in str(caught.value)
