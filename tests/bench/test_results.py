import dataclasses
import json
from pathlib import Path

import pytest

from comfy_tpu.bench.results import Row, Run, read_runs, write_runs
from comfy_tpu.errors import InvalidValueError

ROOT = Path(__file__).parents[2]

ROW = Row("transformer", "forward", "ours", size="832x480x81", samples=(3.0, 1.0, 2.0), flops=4e12, facts={"tokens": 7})


def make_run(*rows: Row, device: str = "H200", **changed: str) -> Run:
    hardware = {
        "platform": "gpu",
        "device": device,
        "devices": 1,
        "device_memory_bytes": 2**37,
        "processor": "a processor",
        "processor_cores": 2,
        "host_memory_bytes": 2**34,
        "driver": "580.1",
    }
    date, versions = "2026-01-02T03:04:05+00:00", {"jax": "0.11.2", "triton": None}
    run = Run(date, "comfy-tpu bench", "full", "bfloat16", hardware, versions, rows)
    return dataclasses.replace(run, **changed)


def test_median_spread_and_rate():
    assert ROW.median_s == 2.0
    assert ROW.spread_s == (1.0, 3.0)
    assert ROW.tflops == 2.0
    assert Row("vae", "decode", "ours", samples=(1.0, 2.0)).median_s == 1.5


def test_a_row_without_samples_has_no_figures():
    row = Row("vae", "decode", "eager", flops=1.0, failure="OutOfMemoryError: no room")
    assert (row.median_s, row.spread_s, row.tflops) == (None, None, None)


def test_a_later_row_takes_the_place_of_an_earlier_one():
    first, other = Row("vae", "decode", "ours", samples=(9.0,)), Row("vae", "decode", "eager", samples=(8.0,))
    run = make_run().with_row(first).with_row(other).with_row(Row("vae", "decode", "ours", samples=(1.0, 2.0)))
    assert {row.peer: row.samples for row in run.rows} == {"ours": (1.0, 2.0), "eager": (8.0,)}


def test_the_file_has_every_raw_sample_and_comes_back_as_it_was(tmp_path):
    path = tmp_path / "results.json"
    failed = Row("vae", "decode", "compile", failure="no compiler", traceback="Traceback …")
    runs = [make_run(ROW, failed), make_run(date="2026-01-03T00:00:00+00:00")]
    write_runs(path, runs)
    document = json.loads(path.read_text())
    assert document["schema"] == 1
    assert set(document["runs"][0]) == {"date", "command", "model", "dtype", "hardware", "versions", "rows", "mesh"}
    row = document["runs"][0]["rows"][0]
    assert row["samples"] == [3.0, 1.0, 2.0]
    assert (row["median_s"], row["spread_s"], row["tflops"]) == (2.0, [1.0, 3.0], 2.0)
    assert read_runs(path) == runs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a file of benchmark results .JSONDecodeError.*`comfy-tpu bench --json` wrote"),
        ('{"runs": []}', "is not a file of benchmark results .KeyError: 'schema'"),
        ('{"schema": 1, "runs": [{}]}', "is not a file of benchmark results"),
        ('{"schema": 7, "runs": []}', "has schema 7, expected 1; measure again"),
    ],
)
def test_other_files_are_refused(tmp_path, text, message):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InvalidValueError, match=message):
        read_runs(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidValueError, match=r"gone\.json is not a file of benchmark results"):
        read_runs(tmp_path / "gone.json")


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks").rglob("*.json")), ids=lambda file: file.stem)
def test_kept_results_name_no_folder_of_a_machine(file):
    assert 'File \\"/' not in file.read_text()
