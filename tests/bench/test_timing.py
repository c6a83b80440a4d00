"""No test here looks at a clock: what is on trial is what is kept, and what a failure leaves."""

import dataclasses

import pytest
import torch

from comfy_tpu.bench.results import Row
from comfy_tpu.bench.timing import Candidate, time_interleaved, time_repeated

ROW = Row("transformer", "forward", "", size="96x64x9", flops=1.0)


def ignore(message):
    pass


def candidate(calls, name, fail_at=None):
    def call():
        calls.append(name)
        if fail_at is not None and calls.count(name) == fail_at:
            raise torch.OutOfMemoryError("CUDA out of memory\nmore about it")
        return torch.ones(2)

    return lambda: Candidate(call, lambda output: output * 2, {"name": name})


def test_peers_are_called_in_turns_after_a_warm_up():
    calls, emitted = [], []
    rows = time_interleaved(
        ROW,
        {"a": candidate(calls, "a"), "b": candidate(calls, "b")},
        repeats=3,
        emit=emitted.append,
        measure_error=lambda x: x.sum(),
    )
    assert calls == ["a", "a", "b", "b"] + ["a", "b"] * 3
    assert [len(row.samples) for row in rows.values()] == [3, 3]
    assert [row.first_s is not None for row in rows.values()] == [True, True]
    assert [row.error for row in rows.values()] == [4, 4]
    assert [row.facts["name"] for row in rows.values()] == ["a", "b"]
    # One sample as soon as there is one: a run that is cut short then has something of everybody.
    assert [len(row.samples) for row in emitted if isinstance(row, Row)] == [1, 1, 1, 1, 2, 2, 3, 3]


def test_without_repeats_only_the_error_is_measured():
    calls = []
    rows = time_interleaved(ROW, {"a": candidate(calls, "a")}, repeats=0, emit=ignore, measure_error=lambda x: 0.5)
    assert calls == ["a"]
    assert (rows["a"].error, rows["a"].samples) == (0.5, ())


@pytest.mark.parametrize("fail_at", [1, 2, 4], ids=["at first", "in the second call", "in a round"])
def test_a_peer_that_fails_is_a_row_and_the_others_go_on(fail_at):
    calls, emitted = [], []
    rows = time_interleaved(
        ROW,
        {"bad": candidate(calls, "bad", fail_at), "good": candidate(calls, "good")},
        repeats=3,
        emit=emitted.append,
    )
    assert rows["bad"].failure == "OutOfMemoryError: CUDA out of memory"
    assert "in call" in rows["bad"].traceback
    assert 'File "comfy_tpu/bench/timing.py"' in rows["bad"].traceback
    assert 'File "/' not in rows["bad"].traceback, "results name no folder of this machine"
    assert rows["bad"].samples == ()
    assert len(rows["good"].samples) == 3
    assert calls.count("bad") == fail_at, "it is not called again"
    assert rows["bad"] in emitted


def test_a_peer_that_cannot_be_prepared_is_a_row():
    def prepare():
        raise RuntimeError("no C++ compiler")

    rows = time_interleaved(ROW, {"compile": prepare}, repeats=1, emit=ignore)
    assert rows["compile"].failure == "RuntimeError: no C++ compiler"


def test_short_calls_are_repeated_and_the_last_is_waited_for():
    calls, waited, emitted = [], [], []

    def call():
        calls.append(len(calls))
        return calls[-1]

    row = time_repeated(ROW, call, waited.append, repeats=2, least_s=1e-3, emit=emitted.append)
    assert len(row.samples) == 2
    assert waited[:3] == [0, 1, 2]
    assert waited[-1] == calls[-1]
    assert emitted == [row]


def test_a_short_call_that_fails_is_a_row():
    row = time_repeated(ROW, lambda: 1 / 0, lambda output: None, repeats=1, least_s=0.0, emit=ignore)
    assert row.failure == "ZeroDivisionError: division by zero"


def test_an_error_without_words_has_its_name():
    failed = ROW.with_failure(MemoryError())
    assert failed.failure == "MemoryError: "
    assert dataclasses.replace(failed, failure=None, traceback=None) == ROW
