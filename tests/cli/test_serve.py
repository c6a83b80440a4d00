"""How a server is started, and what it refuses to start with."""

import argparse
import importlib.util
import json
import socket
from pathlib import Path

import pytest

from comfy_tpu.cli import serve
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.jobs.opening import make_runtime
from comfy_tpu.jobs.request import MODEL_FIELDS

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
    with pytest.raises(InvalidValueError, match=r"uvicorn is not installed.*install .*\[serve\]"):
        serve.check_packages()


def test_every_flag_about_the_model_reaches_it(tmp_path: Path) -> None:
    """A flag that is not in the table below is not known to reach a runtime."""
    chosen = {
        "mesh": "dp=2",
        "platform": "cpu",
        "dtype": "float32",
        "quantize": "int8",
        "cache_dir": str(tmp_path / "programs"),
        "vae_backend": "nnx",
        "tiny_vae": str(tmp_path / "taew2_1.safetensors"),
        "attention": "chunked",
        "attention_window": "2048,2048",
        "attention_blocks": "512,512,512",
        "dense_max_tokens": 64,
        "ignore_config_key": ["shiny"],
    }
    parser, of_model = argparse.ArgumentParser(), argparse.ArgumentParser()
    serve.add_arguments(parser)
    serve.add_model_arguments(of_model)
    assert set(vars(of_model.parse_args([]))) == set(chosen)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in chosen.items() if name != "ignore_config_key"]
    flags.append("--ignore-config-key=shiny")
    values = serve.common_values(parser.parse_args(["demo", *flags]))
    assert json.loads(json.dumps(values)) == chosen  # as the ledger has it
    assert serve.common_values(parser.parse_args(["demo"])) == {}
    unchosen, runtime = make_runtime({}), make_runtime(values)
    for name in chosen:
        others = {other: value for other, value in values.items() if other != name}
        assert unchosen != make_runtime({name: values[name]}), name
        assert runtime != make_runtime(others), name
    assert set(chosen) <= set(MODEL_FIELDS)  # else one opened model would serve requests with different values


@pytest.mark.parametrize("flag", ["--queue-limit=many", "--new-shapes=0", "--new-shapes=1.5", "--sizes=480p"])
def test_limits_that_are_refused(flag: str) -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    with pytest.raises(InvalidValueError, match=r"is not above 0|is not WIDTHxHEIGHT"):
        serve._make_config(parser.parse_args(["demo", flag]), {})
