"""The addresses of servers, and their keys, which never leave for any other address.

A key is kept together with the address that it is for, so that a workflow of somebody else's, which may name any
address, cannot have it sent there.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import urllib.parse
from collections.abc import Iterable, Mapping
from pathlib import Path

from comfy_tpu.errors import InvalidValueError

VARIABLE = "COMFY_TPU_SERVER_KEYS"
_PORTS = {"http": 80, "https": 443}
_FILE_BYTES_MAX = 2**20


@dataclasses.dataclass(frozen=True)
class Address:
    scheme: str
    host: str
    port: int
    path: str = ""
    """Before the paths of the API: a proxy may have one."""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.path}"

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def origin(self) -> tuple[str, str, int]:
        return self.scheme, self.host, self.port


def parse_address(text: str) -> Address:
    """Raises InvalidValueError, which does not repeat what may hold a key."""
    text = text.strip() if isinstance(text, str) else ""
    try:
        parts = urllib.parse.urlsplit(text)
        scheme, host, port = parts.scheme.lower(), parts.hostname, parts.port
        is_usable = scheme in _PORTS and bool(host) and text.isprintable() and " " not in text and port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise InvalidValueError(
            "address is not that of a server; write http://HOST:PORT or https://HOST", field="address"
        )
    if parts.username is not None or parts.query or parts.fragment:
        raise InvalidValueError(
            f"address has more than a host, a port and a path; a key belongs into {VARIABLE} or the file of keys, not "
            "into a workflow",
            field="address",
        )
    return Address(scheme, str(host).lower(), port or _PORTS[scheme], parts.path.rstrip("/"))


def find_key(address: Address, environment: Mapping[str, str], file: Path | None = None) -> str | None:
    """The key for an address, from the variable or else from the file; None where neither has one."""
    texts = [(VARIABLE, environment.get(VARIABLE, "").split(","))]
    if file is not None and file.is_file():
        if file.stat().st_size > _FILE_BYTES_MAX:
            raise InvalidValueError(f"{file} is too large for a list of keys; write ADDRESS=KEY into each line")
        texts.append((str(file), _read_text(file).splitlines()))
    for place, lines in texts:
        for known, key in _read_keys(place, lines):
            if known.origin == address.origin:
                return key
    return None


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InvalidValueError(
            f"{file} cannot be read as a list of keys ({reason}); write ADDRESS=KEY into each line"
        ) from error


def _read_keys(place: str, lines: Iterable[str]) -> Iterable[tuple[Address, str]]:
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        text, _, key = line.partition("=")
        key = key.strip()
        try:
            address = parse_address(text)
        except InvalidValueError:
            key = ""
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise InvalidValueError(f"entry {number} of {place} is not ADDRESS=KEY, such as https://tpu.example.org=…")
        yield address, key
