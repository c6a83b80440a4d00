"""Every reader with files that are damaged or hostile, and with those that broke one before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, seed

from tests.fuzz import job_readers, media_readers, model_readers, planning_readers
from tests.fuzz.cases import LONG, attempt, run_settings
from tests.fuzz.reader import READERS, Case, Reader

MODULES = (job_readers, media_readers, model_readers, planning_readers)
"""Imported for the readers that they add to the table."""
BOUNDED = 25
"""Cases of each reader in the default run: 20 s of one core for all of them."""
CORPUS = Path(__file__).parent / "corpus"
"""What broke a reader before: a directory for each, and in it the files, by the names that they were read under."""


def check(reader: Reader, directory: Path, prepared: Any, case: Case) -> None:
    attempt(lambda: reader.read(directory, prepared, case), directory)


def fuzz(reader: Reader, cases: int, directory: Path) -> None:
    prepared = reader.prepare(directory)

    @seed(2025)
    @run_settings(cases)
    @given(reader.cases())
    def run(case: Case) -> None:
        check(reader, directory, prepared, case)

    run()


@pytest.mark.parametrize("name", sorted(READERS))
def test_damaged_files(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    fuzz(reader, max(2, round(BOUNDED * reader.share)), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("name", sorted(READERS))
def test_ten_thousand_damaged_files(name: str, tmp_path: Path) -> None:
    fuzz(READERS[name], LONG, tmp_path)


def test_files_that_broke_a_reader(tmp_path: Path) -> None:
    for path in sorted(CORPUS.rglob("*")):
        if path.is_file():
            name = path.relative_to(CORPUS).parts[0]
            directory = tmp_path / path.relative_to(CORPUS)
            directory.mkdir(parents=True)
            reader = READERS[name]
            read_as = "/".join(path.relative_to(CORPUS).parts[2:])
            check(reader, directory, reader.prepare(directory), Case(path.read_bytes(), read_as))
