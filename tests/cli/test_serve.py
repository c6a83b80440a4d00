"""How a server is started, and what it refuses to start with."""

import importlib.util
import socket

import pytest

from comfy_tpu.cli import serve
from comfy_tpu.errors import InvalidValueError

KEY = "0123456789abcdef"


def test_keys_of_the_command_line_and_the_environment() -> None:
    assert serve.parse_keys([], {}) == {}
    given = serve.parse_keys([f"ann={KEY}"], {"COMFY_TPU_API_KEYS": f"bob={KEY}=1, eve={KEY}2"})
    assert given == {"ann": KEY, "bob": f"{KEY}=1", "eve": f"{KEY}2"}


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ([KEY], "is not NAME=KEY"),
        (["ann="], "is not NAME=KEY"),
        (["ann=short"], "fewer than 16"),
        ([f"ann={KEY}", f"ann={KEY}2"], "twice"),
        ([f"ann={KEY}", f"bob={KEY}"], "is another client's, too"),
        ([f"ann={KEY} 2"], "than a header can carry"),
        ([f"ann={KEY}é"], "than a header can carry"),
    ],
)
def test_keys_that_are_refused(keys: list[str], reason: str) -> None:
    with pytest.raises(InvalidValueError, match=reason) as caught:
        serve.parse_keys(keys, {})
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.0.0.2"])
def test_this_machine_needs_no_key(host: str) -> None:
    serve.check_host(host, {})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "example.com", ""])
def test_other_machines_need_one(host: str) -> None:
    serve.check_host(host, {"ann": KEY})
    with pytest.raises(InvalidValueError, match="there is no key"):
        serve.check_host(host, {})


@pytest.mark.parametrize("port", [-1, 0, 65536, 99999])
def test_what_is_no_port(port: int) -> None:
    with pytest.raises(InvalidValueError, match="is no port"):
        serve.open_socket("127.0.0.1", port)


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(InvalidValueError, match="cannot be used"):
        serve.open_socket("127.0.0.1", taken.getsockname()[1])


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else object())
    with pytest.raises(InvalidValueError, match=r"uvicorn is not installed.*comfy-tpu\[serve\]"):
        serve.check_packages()
