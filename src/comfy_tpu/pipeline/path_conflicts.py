"""Checks that outputs do not replace each other, or a file that the run reads."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from comfy_tpu.errors import InvalidValueError
from comfy_tpu.pipeline.frame_names import frame_name_pattern, is_sequence


def check_conflicts(outputs: Sequence[tuple[str, Path]], inputs: Iterable[Path] = ()) -> None:
    """Raises InvalidValueError if two outputs are the same file, under any names and links, or one is an input.

    `outputs` are pairs of a field, for the error, and a path; frames/f-%04d.png means all frames. An input that is a
    directory stands for the files in it: a video may be given as its frames.
    """
    for (_, first), (field, second) in itertools.combinations(outputs, 2):
        if _is_same_file(first, second):
            raise InvalidValueError(
                f"{field}={second} is the same file as {first}, which is written too; choose another name", field=field
            )
    for (field, output), given in itertools.product(outputs, itertools.chain.from_iterable(map(_list_files, inputs))):
        if _is_same_file(output, given):
            raise InvalidValueError(
                f"{field}={output} would replace {given}, which is an input of this run; choose another name",
                field=field,
            )


def _list_files(given: Path) -> list[Path]:
    try:
        return sorted(given.iterdir()) if given.is_dir() else [given]
    except OSError:  # whoever reads the directory says what is wrong with it
        return [given]


def _is_same_file(first: Path, second: Path) -> bool:
    if is_sequence(second):
        first, second = second, first
    target, other = (Path(os.path.realpath(path)) for path in (first, second))
    if is_sequence(first):
        names = frame_name_pattern(first.name)
        # A link among the frames is replaced; a frame that a link elsewhere leads to is, too.
        places = (other, Path(os.path.realpath(second.parent)) / second.name)
        among = [place for place in places if _is_same_directory(place.parent, target.parent)]
        return any(place.name == first.name or names.fullmatch(place.name) for place in among)
    if target.exists() and other.exists():
        return target.samefile(other)
    return target.name == other.name and _is_same_directory(target.parent, other.parent)


def _is_same_directory(one: Path, other: Path) -> bool:
    return one == other or (one.exists() and other.exists() and one.samefile(other))
