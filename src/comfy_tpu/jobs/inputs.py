"""The images and LoRAs of a job as files of this machine: its own, fetched, or sent by the first host."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

from comfy_tpu.config import Lora
from comfy_tpu.jobs.folder import fetch
from comfy_tpu.jobs.request import INPUT_FIELDS, split_lora
from comfy_tpu.parallel import hosts

Files = dict[str, list[dict[str, Any]]]
"""Input files by field: `address`, the rest of a LoRA's fields, and `key` for a file that the first host sends."""


class Inputs:
    """Input files, in a directory that is removed by `close`. All hosts of a run call `fetch` with the same values."""

    def __init__(self) -> None:
        self._directory = TemporaryDirectory(prefix="comfy-tpu-inputs-")
        self._copies: dict[str, Path] = {}
        """Files of the last job that the first host sent, by key; on the first host itself, where they are."""

    def close(self) -> None:
        self._directory.cleanup()

    def fetch(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values with local paths for images, and a `Lora` for each LoRA."""
        files: Files = hosts.first_host_value(lambda: _list_files(values))
        self._share({file["key"]: Path(file["address"]) for each in files.values() for file in each if file["key"]})
        fetched = dict(values)
        for name, each in files.items():
            local: list[Any] = [self._open(file) for file in each]
            fetched[name] = local if isinstance(values[name], list) or name == "lora" else local[0]
        return fetched

    def _share(self, wanted: Mapping[str, Path]) -> None:
        """Copies files of the first host that the others do not have yet, and removes those of no use."""
        new = {key: path for key, path in wanted.items() if key not in self._copies}
        for key in [key for key in self._copies if key not in wanted]:
            unused = self._copies.pop(key)
            if not hosts.is_first_host():
                shutil.rmtree(unused.parent, ignore_errors=True)
        if new:
            self._copies |= hosts.copy_files(new, Path(mkdtemp(dir=self._directory.name)))

    def _open(self, file: Mapping[str, Any]) -> str | Lora:
        key, address = file["key"], file["address"]
        path = self._copies.get(key, Path(address)) if key else fetch(address, Path(self._directory.name))
        return str(path) if file["lora"] is None else Lora(path, **file["lora"])


def _list_files(values: Mapping[str, Any]) -> Files:
    return {
        name: [_describe(name, text) for text in (given if isinstance(given, list) else [given])]
        for name in INPUT_FIELDS
        if (given := values.get(name))
    }


def _describe(name: str, text: str) -> dict[str, Any]:
    address, rest = split_lora(text) if name == "lora" else (text, None)
    return {"address": address, "lora": rest, "key": _key(address) if hosts.host_names() else None}


def _key(address: str) -> str | None:
    """Of a local file that can be sent; None for an address, and for a file that is not here, as reading it says."""
    if "://" in address:
        return None
    with contextlib.suppress(OSError, ValueError):
        found = Path(address).stat()
        return f"{address}:{found.st_size}:{found.st_mtime_ns}"
    return None
