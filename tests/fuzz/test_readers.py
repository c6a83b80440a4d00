"""Every reader with files that are damaged or hostile, and with those that broke one before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, seed

from comfy_tpu.errors import ComfyTpuError
from tests.fuzz import job_readers, media_readers, model_readers, planning_readers
from tests.fuzz.cases import LONG, attempt, run_settings
from tests.fuzz.reader import READERS, Case, Reader

MODULES = (job_readers, media_readers, model_readers, planning_readers)
"""Imported for the readers that they add to the table."""
BOUNDED = 12
"""Cases of each reader in the default run."""
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


MESSAGES: dict[str, str | None] = {
    "architecture/key-of-two-lines": "has a b, which WanTransformer3DModel of diffusers",
    "benchmark/device-without-glyphs": None,
    "benchmark/model-of-400-letters": None,
    "benchmark/no-tokens": r"a run in there cannot be shown \(KeyError: 'tokens'\); give files that `comfy-tpu bench",
    "checkpoint_index/name-too-long": "lacks x{400}.safetensors, which should be there according to",
    "comfyui_answer/errors-number": None,
    "exported_program/bomb": r"plan.json has 16777217 bytes, and 16777216 are the most",
    "exported_program/mesh-null": r"is damaged \(dp is None\); export it again",
    "exported_program/slice-no-text": r"is damaged \(slice_name is \{\}\); export it again",
    "hlo/calls-itself": None,
    "hlo/calls-twice-sixty-times": None,
    "hub_cache/not-utf8": None,
    "hub_cache/outside": None,
    "jobs/key-of-two-lines": None,
    "ledger/not-utf8": r"cannot be used \(.*\); remove it: finished jobs are found again by results.jsonl",
    "lora/endless-pattern": r"is not PEFT's \(.* has a repeated group, or more than 2 repetitions\); download it again",
    "model_directory/factors-null": None,
    "ported_source/nested-too-deeply": "net is nested too deeply for Python; write it with fewer levels",
    "ported_directory/class-without-name": "diffusers has no class ; give one of its models",
    "results/request-list": None,
    "schedule_directory/not-utf8": "libtpu writes the slots of a schedule in a form that is not known",
    "server_keys/not-utf8": r"cannot be read as a list of keys \(it is not UTF-8 text\); write ADDRESS=KEY",
    "sound_track/playlist": "has a sound that cannot be read",
    "stage_message/ranges-null": None,
    "stored_program/no-name": None,
    "stored_program/no-object": None,
    "video/growing-animation": "is damaged|more than 16384 on a side",
    "video/shown-for-years": "is shown for .* s, more than 14,400 s; cut a piece out of it",
}
"""What a reader says of a file of the corpus; None: the reader goes on without it."""


def test_the_corpus_is_in_the_table() -> None:
    found = {"/".join(path.relative_to(CORPUS).parts) for path in CORPUS.glob("*/*")}
    assert found == set(MESSAGES)


@pytest.mark.parametrize("which", MESSAGES)
def test_files_that_broke_a_reader(which: str, tmp_path: Path) -> None:
    (path,) = (path for path in (CORPUS / which).rglob("*") if path.is_file())
    reader, case = READERS[which.partition("/")[0]], Case(path.read_bytes(), str(path.relative_to(CORPUS / which)))
    prepared = reader.prepare(tmp_path)
    check(reader, tmp_path, prepared, case)
    if (message := MESSAGES[which]) is not None:
        with pytest.raises(ComfyTpuError, match=message):
            reader.read(tmp_path, prepared, case)
