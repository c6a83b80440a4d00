"""What strangers try: each is refused with the right status, and others are served meanwhile."""

import contextlib
import dataclasses
import json
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from comfy_tpu.config import GenerationSettings
from comfy_tpu.serving.api import make_app
from comfy_tpu.serving.config import Limits
from comfy_tpu.serving.connections import make_server
from tests.serving.stand_in import Served, running
from tests.serving.test_api import png

KEYS = {"ann": "a-key-of-ann-0001", "bob": "a-key-of-bob-0001"}
ANN = {"Authorization": f"Bearer {KEYS['ann']}"}


@contextlib.contextmanager
def listening(directory: Path, header_seconds: float = 20.0, **options: Any) -> Iterator[int]:
    """The port of a real socket, with the HTTP server of `comfy-tpu serve`."""
    with running(directory, **options) as (_, service, _), socket.create_server(("127.0.0.1", 0)) as opened:
        server = make_server(make_app(service), header_seconds=header_seconds)
        service.is_stopping = lambda: server.should_exit
        thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
        thread.start()
        try:
            yield opened.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(20)


def connect(port: int, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    connection.sendall(sent)
    return connection


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    parts = []
    with connection, contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def get_health(port: int) -> int:
    return status_of(read_all(connect(port, head(port, "GET /healthz", "Connection: close"))))


def head(port: int, line: str, *headers: str) -> bytes:
    lines = [f"{line} HTTP/1.1", f"Host: 127.0.0.1:{port}", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


@pytest.mark.slow
def test_half_open_connections_end(tmp_path: Path) -> None:
    """500 of them, of which some send a byte now and then: others are served, and all of them are closed."""
    with listening(tmp_path, header_seconds=5.0) as port, contextlib.ExitStack() as stack:
        beginnings = (b"", b"GET /v1/videos HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: ")
        held = [stack.enter_context(connect(port, beginnings[number % 2])) for number in range(500)]
        begun = time.monotonic()
        while time.monotonic() - begun < 1.5:
            for connection in held[481::2]:
                with contextlib.suppress(ConnectionError):  # its time may be over on a slow machine
                    connection.sendall(b"b")
            assert get_health(port) == 200
            time.sleep(0.2)
        for connection in held:
            assert read_all(connection).startswith(b"HTTP/1.1 408") or connection in held[481::2]
        assert get_health(port) == 200


@pytest.mark.thorough  # by default: slow headers and bodies
def test_a_second_request_on_a_connection_has_its_time(tmp_path: Path) -> None:
    # Not less: on a busy machine a second may pass between a connection and its first byte.
    with listening(tmp_path, header_seconds=1.5) as port, connect(port, head(port, "GET /healthz")) as connection:
        assert status_of(connection.recv(65536)) == 200
        time.sleep(1.7)  # longer than headers may take, but between two requests
        connection.sendall(head(port, "GET /healthz"))
        assert status_of(connection.recv(65536)) == 200
        connection.sendall(b"GET /hea")
        assert status_of(read_all(connection)) == 408


def test_a_slow_body(tmp_path: Path) -> None:
    with listening(tmp_path, limits=Limits(body_seconds=1.0)) as port:
        sent = head(port, "POST /v1/videos", "Content-Type: application/json", "Content-Length: 1000")
        connection, begun = connect(port, sent + b'{"prompt": "'), time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - begun < 0.8:
                connection.sendall(b"a")
                time.sleep(0.1)
        assert status_of(read_all(connection)) == 408
        assert time.monotonic() - begun < 10


@pytest.mark.parametrize(
    "headers",
    [("Content-Length: 999999999999",), ("Transfer-Encoding: chunked",)],
)
def test_a_large_body(headers: tuple[str, ...], tmp_path: Path) -> None:
    with listening(tmp_path, limits=Limits(body_bytes=10_000)) as port:
        connection = connect(port, head(port, "POST /v1/videos", "Content-Type: application/json", *headers))
        with contextlib.suppress(ConnectionError):  # the server may have answered and closed
            for _ in range(20):
                connection.sendall(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
        assert status_of(read_all(connection)) == 413
        assert get_health(port) == 200


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of one server for all that is refused; a file "x" lies beside its directory."""
    directory = tmp_path_factory.mktemp("listening")
    (directory / "x").write_text("secret")
    with listening(directory / "served", header_seconds=3.0) as port:
        yield port
    assert (directory / "x").exists()


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /v1/videos HTTP/1.1\r\n\r\n",  # without a host
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nA b: c\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Request-Id: a\r\n b\r\nX-B\r\n\r\n",
        b"POST /v1/videos HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/videos HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"POST /v1/videos HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    ],
    ids=["tls", "http2", "version", "no host", "name", "folded", "negative", "lengths", "chunk", "path", "header"],
)
def test_requests_that_are_none(sent: bytes, port: int) -> None:
    connection = connect(port)
    with contextlib.suppress(ConnectionError):
        connection.sendall(sent)
    answer = read_all(connection)
    assert not answer or 400 <= status_of(answer) < 500, answer[:200]
    assert get_health(port) == 200


def test_an_upgrade_to_a_websocket_is_no_way_in(tmp_path: Path) -> None:
    with listening(tmp_path, keys=KEYS) as port:
        upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: YQ==")
        connection = connect(port, head(port, "GET /v1/videos", *upgrade))
        assert status_of(connection.recv(65536)) == 401
        connection.close()


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("application/json", b'{"prompt": "a", }'),
        ("application/json", b'"a"'),
        ("application/json", b"null"),
        ("application/json", '{"prompt": "ä"}'.encode("latin-1")),
        ("application/json", '{"prompt": "a"}'.encode("utf-16")),
        ("application/json", b'{"prompt": "\\ud800"}'),
        ("application/json", b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}"),
        ("application/json; charset=utf-7", b"+AHs-"),
        ("application/json", zlib.compress(b'{"prompt": "a"}')),
        ("application/xml", b"<!DOCTYPE x [<!ENTITY e SYSTEM 'file:///etc/passwd'>]><x>&e;</x>"),
        ("application/x-pickle", b"cos\nsystem\n(S'id'\ntR."),
        ("multipart/form-data", b"--x\r\n"),
        ("multipart/form-data; boundary=", b"--\r\n"),
        ("multipart/form-data; boundary=x", b"--y\r\nnothing"),
        ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na'),
        ("multipart/form-data; boundary=x", b"--x\r\nContent-Disposition: form-data\r\n\r\na\r\n--x--\r\n"),
        ("multipart/form-data; boundary=x; charset=none", b'--x\r\nA: b; name="p"\r\n\r\n\xff\r\n--x--\r\n'),
        ("application/x-www-form-urlencoded", b"%ff%fe=%00&prompt="),
        ("application/x-www-form-urlencoded", b"&".join(b"a%d=1" % number for number in range(1000))),
    ],
)
def test_malformed_bodies(kind: str, content: bytes, shared: Served) -> None:
    client, service = shared
    for path in ("/v1/videos", "/v1/images/generations"):
        answer = client.post(path, content=content, headers={"Content-Type": kind})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]
    assert service.ledger.counts().total == 0


def test_much_json_is_refused(tmp_path: Path) -> None:
    """It would hold the interpreter, and so all others, while it is parsed."""
    with running(tmp_path) as (client, _, _):
        content = b'{"prompt": "a", "user": [' + b"1," * 2**20 + b"1]}"
        answer = client.post("/v1/videos", content=content, headers={"Content-Type": "application/json"})
        assert (answer.status_code, "bytes of JSON" in answer.json()["error"]["message"]) == (413, True)


def test_a_client_with_many_open_requests(tmp_path: Path) -> None:
    """Others are served, and it, too, as soon as it has fewer."""
    with listening(tmp_path, keys=KEYS, limits=Limits(client_requests=3)) as port, contextlib.ExitStack() as stack:
        ann, bob = (f"Authorization: Bearer {key}" for key in KEYS.values())
        fields = ("Content-Type: application/json", "Content-Length: 18", "Connection: close")
        answer = read_all(connect(port, head(port, "POST /v1/videos", ann, *fields) + b'{"prompt": "wait"}'))
        id_ = json.loads(answer.partition(b"\r\n\r\n")[2])["id"]
        follow = head(port, f"GET /v1/videos/{id_}/events", ann)
        held = [stack.enter_context(connect(port, follow)) for _ in range(3)]
        assert [status_of(connection.recv(20)) for connection in held] == [200] * 3

        def get(key: str) -> bytes:
            return read_all(connect(port, head(port, "GET /v1/videos", key, "Connection: close")))

        refused = get(ann)
        assert status_of(refused) == 429
        assert b"retry-after: 1" in refused
        assert status_of(get(bob)) == 200
        held[0].close()
        deadline = time.monotonic() + 20
        while status_of(get(ann)) != 200:
            assert time.monotonic() < deadline


ADDRESSES = (
    "http://169.254.169.254/latest/meta-data/",
    "http://127.0.0.1:1/",
    "file:///etc/passwd",
    "/etc/passwd",
    "gs://bucket/a.png",
    "data:image/png;base64,AAAA",
    "\\\\host\\share\\a.png",
)


@pytest.mark.parametrize("address", ADDRESSES)
def test_addresses_are_not_fetched(address: str, tmp_path: Path) -> None:
    with running(tmp_path, "demo-image", lora_directory=tmp_path) as (client, service, _):
        for field in ("image", "image[]", "input_reference"):
            for value in (address, [address], {"image_url": address}, {"url": address}):
                assert client.post("/v1/videos", json={"prompt": "a", field: value}).status_code == 400
            form = client.post("/v1/videos", data={"prompt": "a", field: address})
            assert (form.status_code, form.json()["error"]["param"]) == (400, field)
        for field in ("lora", "model", "last_image", "vae", "transformer", "output", "cache_dir"):
            image = {"input_reference": png(8, 8)}
            answer = client.post("/v1/videos", data={"prompt": "a", field: address}, files=image)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        assert service.ledger.counts().total == 0


PATHS = ("../secret", "..%2fsecret", "/secret", "a/../../secret", "secret\0", "link", "a" * 5000, "ä" * 200, ".", "")


def test_loras_outside_of_their_directory(tmp_path: Path) -> None:
    inside = tmp_path / "loras"
    inside.mkdir()
    (tmp_path / "secret.safetensors").write_bytes(b"")
    (inside / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    with running(tmp_path / "served", lora_directory=inside) as (client, _, _):
        for name in PATHS[:-1]:
            for lora in (name, f"{name}.safetensors", [name], f"{name}:0.5"):
                answer = client.post("/v1/videos", json={"prompt": "a", "lora": lora})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora"), lora
        answer = client.post("/v1/videos", json={"prompt": "a", "lora": ["x"] * 100_000})
        assert "are the most" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "id_", ["..", "../x", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "%00", "a%0d%0aX-A:b", "a" * 5000, "*"]
)
def test_ids_are_no_paths(id_: str, port: int) -> None:
    for path in (f"/v1/videos/{id_}", f"/v1/videos/{id_}/content", f"/v1/stages/{id_}/preview", f"/page/{id_}"):
        for method in ("GET", "DELETE"):
            answer = read_all(connect(port, head(port, f"{method} {path}", "Connection: close")))
            assert status_of(answer) in (404, 405), (method, path)
            assert b"X-A" not in answer.partition(b"\r\n\r\n")[0]
            assert b"secret" not in answer


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Basic {KEYS['ann']}"},
        {"Authorization": f"Bearer: {KEYS['ann']}"},
        {"Authorization": f"Bearer {KEYS['ann'].upper()}"},
        {"Authorization": f"Bearer {KEYS['ann'][:-1]}"},
        {"Authorization": f"Bearer {KEYS['ann']}x"},
        {"Authorization": f"Bearer ann={KEYS['ann']}"},
        {"Authorization": f"Bearer {KEYS['ann']},{KEYS['bob']}"},
        {"Authorization": "Bearer ann"},
        {"Authorization": "Bearer \xff\xfe"},
        {"X-Api-Key": KEYS["ann"]},
        {"Cookie": f"key={KEYS['ann']}"},
        {"X-Forwarded-For": "127.0.0.1", "X-Original-URL": "/healthz"},
    ],
)
def test_wrong_keys(headers: dict[str, str], tmp_path: Path) -> None:
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    with running(tmp_path, keys=KEYS) as (client, _, _):
        for path in ("/v1/videos", "/metrics", "/openapi.json", "/v1/stages/models", "/nothing", "//v1/videos"):
            given = {"key": KEYS["ann"], "api_key": KEYS["ann"], "access_token": KEYS["ann"]}
            answer = client.get(path, headers=encoded, params=given)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert client.post("/v1/videos", json={"prompt": "a"}, headers=encoded).status_code == 401
        assert client.get("/v1/videos", headers={"authorization": f"bearer  {KEYS['ann']} "}).status_code == 200


def test_two_keys_are_none(tmp_path: Path) -> None:
    with listening(tmp_path, keys=KEYS) as port:
        both = [f"Authorization: Bearer {key}" for key in KEYS.values()]
        for headers, status in ((both, 401), (both[:1] * 2, 401), (both[:1], 200)):
            sent = head(port, "GET /v1/videos", *headers, "Connection: close")
            assert status_of(read_all(connect(port, sent))) == status
        for path in ("/healthz/../v1/videos", "/healthz%2f..%2fv1/videos", "/healthz;/v1/videos", "/v1/videos%00"):
            sent = head(port, f"GET {path}", "Connection: close")
            assert status_of(read_all(connect(port, sent))) == 401


def test_stages_of_another_client(tmp_path: Path) -> None:
    """Those of videos: tests/serving/test_api.py."""
    with running(tmp_path, keys=KEYS) as (client, _, _):
        made = client.post("/v1/videos", json={"prompt": "a"}, headers=ANN).json()["id"]
        bob = {"Authorization": f"Bearer {KEYS['bob']}"}
        for path in (f"/v1/images/{made}", f"/v1/stages/{made}", f"/v1/stages/{made}/content", f"/v1/videos/{made}"):
            assert client.get(path, headers=bob).status_code == 404
        assert client.get("/v1/videos", params={"after": made}, headers=bob).json()["data"] == []
        headers = {**bob, "Idempotency-Key": "k"}
        mine = client.post("/v1/videos", json={"prompt": "a"}, headers={**ANN, "Idempotency-Key": "k"}).json()["id"]
        assert client.post("/v1/videos", json={"prompt": "a"}, headers=headers).json()["id"] != mine


@pytest.mark.parametrize("given", ["a\tb", "a b", "<script>", "a" * 65, "é", ""])
def test_request_ids_that_are_not_taken_over(given: str, tmp_path: Path) -> None:
    with running(tmp_path) as (client, _, _):
        answer = client.get("/healthz", headers={"X-Request-Id": given.encode()})
        assert answer.status_code == 200
        assert answer.headers["X-Request-Id"] != given
        assert client.get("/healthz", headers={"X-Request-Id": "a.b:c-1"}).headers["X-Request-Id"] == "a.b:c-1"


NUMBERS = ("-1", "1e999", "nan", "-inf", "9" * 400, "9" * 5000, "1e308", "0x10", "1;DROP TABLE jobs", " ", "a" * 10**5)
LITERALS = ("NaN", "-Infinity", "1e999", "-1e308", "9" * 400, '{"a": []}', "true", "[[1]]", *map(json.dumps, NUMBERS))
SETTINGS = [field.name for field in dataclasses.fields(GenerationSettings) if field.type != "str"]


@pytest.mark.parametrize("name", [*SETTINGS, "steps", "guidance", "frames", "seconds", "size"])
def test_hostile_numbers(name: str, shared: Served) -> None:
    allowed = {"-1", '"-1"'} if name == "context_overlap" else set()  # there it is the default
    client, service = shared
    for literal in LITERALS:
        if literal in allowed:
            continue
        content = f'{{"prompt": "a", "{name}": {literal}}}'
        answer = client.post("/v1/videos", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, (literal[:40], answer.text[:200])
        assert len(answer.content) < 5000  # nothing is sent back at length
    for literal in NUMBERS:
        if literal in allowed:
            continue
        answer = client.post("/v1/videos", data={"prompt": "a", name: literal})
        assert answer.status_code == 400, (literal[:40], answer.text[:200])
    assert service.ledger.counts().total == 0


@pytest.mark.parametrize("name", ["negative_prompt", "scheduler", "model", "prompt", "lora", "size", "no_such_field"])
def test_hostile_texts(name: str, shared: Served) -> None:
    client, _ = shared
    for value in ("x" * 500_000, ["x"], {"x": "x"}, 7, True, 1.5):
        answer = client.post("/v1/videos", json={"prompt": "a", name: value})
        assert answer.status_code == 400, (name, str(value)[:40])
        assert answer.json()["error"]["param"] == name
        assert len(answer.content) < 5000
    assert client.post("/v1/videos", json={"prompt": "a", "x" * 100_000: 1}).status_code == 400


def test_methods_that_there_are_not(tmp_path: Path) -> None:
    with running(tmp_path) as (client, _, _):
        for method in ("PUT", "PATCH", "OPTIONS", "TRACE", "PROPFIND"):
            answer = client.request(method, "/v1/videos")
            assert answer.status_code == 405
            assert answer.headers["Allow"] == "GET, HEAD, POST"
        assert client.get("/nothing").json()["error"]["message"]


@pytest.mark.parametrize(
    "given", ["bytes=9-1", "bytes=-0", "bytes=99999999999-", "lines=1-2", "bytes=" + "0-1," * 5000]
)
def test_hostile_ranges(given: str, tmp_path: Path) -> None:
    with running(tmp_path) as (client, _, _):
        made = client.post("/v1/videos", json={"prompt": "a cat"}).json()["id"]
        deadline = time.monotonic() + 20
        while client.get(f"/v1/videos/{made}/content").status_code != 200:
            assert time.monotonic() < deadline
        answer = client.get(f"/v1/videos/{made}/content", headers={"Range": given})
        assert answer.status_code in (200, 206, 400, 416)
        assert len(answer.content) < 5000
