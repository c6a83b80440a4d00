"""comfy-tpu download: fetches the files that a model needs, and goes on where an earlier download ended.

With --json, one object a line on stdout, by its "event":

    progress    file, done, total: bytes of all files, with those that are here already
    done        directory, bytes
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from comfy_tpu.cli.options import add_ignored_keys, path_parser
from comfy_tpu.cli.terminal import print_paths
from comfy_tpu.config import DEMO_IMAGE_MODEL, DEMO_MODEL
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.card import Config
from comfy_tpu.families.registry import find_published
from comfy_tpu.hub.download import Transfer, download_model

_SECONDS = 1.0
"""Between two lines of progress, for programs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a hub id, or the last part of one that `comfy-tpu models` lists"
    )
    parser.add_argument(
        "--local-dir",
        type=path_parser("--local-dir"),
        metavar="DIR",
        help="a directory for the model, instead of the hub's cache (HF_HOME)",
    )
    parser.add_argument("--revision", metavar="NAME", help="a branch, a tag or a commit (main)")
    add_ignored_keys(parser)
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of a bar and the directory")


def run(arguments: argparse.Namespace) -> int:
    model, directory = _check(arguments.model), arguments.local_dir
    if directory is not None and directory.exists() and not directory.is_dir():
        raise InvalidValueError(f"local_dir={directory} is a file; give a directory", field="local_dir")
    with JsonLines() if arguments.json else Bar(model) as display:
        found = download_model(
            model,
            directory=directory,
            revision=arguments.revision,
            on_progress=display,
            check=lambda index, read: _check_configs(index, read, model, arguments.ignore_config_key),
        )
    display.finish(found)
    return 0


def _check_configs(index: Config, read: Callable[[str], Config], model: str, ignored: list[str]) -> None:
    from comfy_tpu.pipeline.config_files import check_repository

    check_repository(index, read, model, ignored)


def _check(model: str) -> str:
    if model in (DEMO_MODEL, DEMO_IMAGE_MODEL):
        raise InvalidValueError(f"model={model} comes with comfy-tpu; there is nothing to download", field="model")
    published = find_published(model)
    if published is not None:
        return published[0]
    if "/" not in model or Path(model).is_dir():
        raise InvalidValueError(
            f'model={model} is no hub id; give one such as "owner/name", or see `comfy-tpu models`', field="model"
        )
    return model


class Bar:
    """A bar on stderr if it is a terminal, and the directory on stdout."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._bar: Any = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, transfer: Transfer) -> None:
        if self._bar is None:
            self._bar = self._make_bar(transfer)
        self._bar.update(transfer.done - self._bar.n)

    def _make_bar(self, transfer: Transfer) -> Any:
        from tqdm import tqdm

        # From what is here: the rate and the time left are those of the bytes that come.
        return tqdm(
            total=transfer.total,
            initial=transfer.done,
            desc=self._model,
            unit="B",
            unit_scale=True,
            disable=not sys.stderr.isatty(),
        )

    def finish(self, directory: Path) -> None:
        print_paths([directory])


class JsonLines:
    def __init__(self) -> None:
        self._last: Transfer | None = None
        self._shown_at = 0.0

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def __call__(self, transfer: Transfer) -> None:
        now = time.monotonic()
        is_end = transfer.done == transfer.total
        if self._last is None or is_end or now - self._shown_at >= _SECONDS:
            self._shown_at = now
            self._print({"event": "progress", "file": transfer.file, "done": transfer.done, "total": transfer.total})
        self._last = transfer

    def finish(self, directory: Path) -> None:
        total = 0 if self._last is None else self._last.total
        self._print({"event": "done", "directory": str(directory), "bytes": total})

    def _print(self, event: dict[str, Any]) -> None:
        print(json.dumps(event), flush=True)
