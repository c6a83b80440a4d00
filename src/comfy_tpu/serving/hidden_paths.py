"""Messages for clients, who are not to learn where a server keeps its files."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Collection
from pathlib import Path

from huggingface_hub import constants

from comfy_tpu.serving.config import ServeConfig

_PREFIX = r"(?:file:(?://[\w.-]*)?|~[\w.-]*)?"
_CHARACTER = r"""(?:[^\s'"`<>|:;,()]|,(?![\s/]|$))"""
_QUOTED = "|".join(rf"(?<={quote}){_PREFIX}/[^{quote}\n]+/[^{quote}\n]*(?={quote})" for quote in "'\"")
# After a word or a dot, a slash belongs to a hub id, a unit or a relative path; before another slash, to an address.
_BEGIN = rf"(?<![\w./]){_PREFIX}"
_ANY = rf"/(?!/){_CHARACTER}+/{_CHARACTER}*"  # two components at least
_ROUTE = re.compile(r"/v1/(?:videos|images|stages|models)(?:/(?!\.\.?(?:/|$))[^/]*)*")


def find_roots(config: ServeConfig) -> frozenset[str]:
    """The directories of a server, of which even those with spaces are known where they are not quoted."""
    given = (config.directory, config.lora_directory, config.common.get("cache_dir"), *config.models)
    places = (*given, constants.HF_HUB_CACHE, os.environ.get("HOME"), sys.prefix)
    paths = [Path(str(place)) for place in places if place is not None]
    known = [path for path in paths if path.is_absolute() or path in (config.directory, config.lora_directory)]
    return frozenset(str(each) for path in known for each in (path.absolute(), path.resolve())) - {"/"}


def hide_paths(message: str, names: Collection[str] = (), roots: frozenset[str] = frozenset()) -> str:
    """The message with the last component of each absolute path instead of the path. `names`: paths that clients know,
    since they are the names of models. `roots`: directories below which paths are found."""

    def shorten(match: re.Match[str]) -> str:
        path = match[0]
        return path if path in names or _ROUTE.fullmatch(path) else path.rstrip("/").rpartition("/")[2]

    return _compile(roots).sub(shorten, message)


@functools.cache
def _compile(roots: frozenset[str]) -> re.Pattern[str]:
    known = [rf"{re.escape(root)}(?:/{_CHARACTER}*|(?![\w-]|\.\w))" for root in sorted(roots, key=len, reverse=True)]
    return re.compile(rf"{_QUOTED}|{_BEGIN}(?:{'|'.join([*known, _ANY])})")
