"""Compiled programs do not fill the memory of a server whose clients choose many sizes."""

from pathlib import Path

import pytest

from comfy_tpu.jobs import execution
from comfy_tpu.jobs.folder import Folder
from comfy_tpu.jobs.ledger import Job
from comfy_tpu.jobs.outcome import Outcome
from comfy_tpu.jobs.request import Request
from comfy_tpu.pipeline.running_model import RunningModel


@pytest.mark.slow
def test_programs_of_many_sizes_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, forget = list[int](), RunningModel.forget_programs

    def forget_and_count(running: RunningModel) -> None:
        counts.append(running.compiled_count)
        forget(running)
        assert running.compiled_count == 0

    monkeypatch.setattr(RunningModel, "forget_programs", forget_and_count)
    monkeypatch.setattr(execution, "_PROGRAMS_MAX", 2)
    monkeypatch.setattr(execution, "_SHAPES_MAX", 2)
    folder, outcomes = Folder(str(tmp_path)), list[Outcome]()
    folder.prepare()
    executor = execution.Executor(folder, on_outcome=outcomes.append)
    try:
        for number, side in enumerate((16, 32, 16)):
            values = {"model": "demo", "prompt": "a circle", "width": side, "height": 16, "num_inference_steps": 1}
            executor.run([Job(f"job{number}", Request({**values, "num_frames": 1}), f"{number}.mp4", 1)])
            assert len(executor._rows_compiled) <= 2
    finally:
        executor.close()
    assert [outcome.state for outcome in outcomes] == ["done"] * 3
    assert len(counts) >= 2
    assert min(counts) > 2
