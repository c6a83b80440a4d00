"""A ledger that is damaged or gone: finished files stay, are found again, and belong to those who ordered them."""

import contextlib
import os
import shutil
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from comfy_tpu.errors import ComfyTpuError
from comfy_tpu.jobs.ledger import NewJob, OutputFile
from comfy_tpu.jobs.request import Request
from comfy_tpu.jobs.served_ledger import Order, ServedLedger, owners_path, read_owners
from comfy_tpu.pipeline import media
from comfy_tpu.serving.config import Retention
from comfy_tpu.serving.recovery import open_ledger
from comfy_tpu.serving.retention import Sweeper
from tests.serving.stand_in import running
from tests.serving.test_api import KEYS, create, wait_for

LEDGER = ".comfy-tpu/ledger.sqlite3"


def tear_page(path: Path) -> None:
    """Damages one page in the middle, which opening the ledger does not read."""
    with sqlite3.connect(path) as database:
        (page,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'jobs_by_output'").fetchone()
        (size,) = database.execute("PRAGMA page_size").fetchone()
    database.close()
    with path.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(os.urandom(size))


def overwrite(path: Path) -> None:
    path.write_bytes(os.urandom(8192))


def write_video(path: Path, prompt: str = "a cat", **metadata: str) -> bytes:
    with media.open_writer(path, fps=4, metadata={"prompt": prompt, **metadata}) as writer:
        writer.write(torch.rand(5, 64, 64, 3))
    return path.read_bytes()


def remove_stray_outputs(ledger: ServedLedger, directory: Path) -> None:
    """As a server does when it starts."""
    Sweeper(ledger, directory, directory, Retention(), lambda record: None)._remove_stray_outputs()


@pytest.mark.parametrize("damage", [overwrite, tear_page, Path.unlink])
def test_finished_files_are_found_again(tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture) -> None:
    headers = {name: {"Authorization": f"Bearer {key}"} for name, key in KEYS.items()}
    made, contents = {}, {}
    with running(tmp_path, keys=KEYS) as (client, _, _):
        for name in KEYS:
            answer = client.post("/v1/videos", json={"prompt": name}, headers=headers[name])
            made[name] = wait_for(client, answer.json()["id"], "completed", headers=headers[name])["id"]
            contents[name] = write_video(tmp_path / f"{made[name]}.mp4")
    damage(tmp_path / LEDGER)
    with running(tmp_path, keys=KEYS) as (client, service, _):
        service._sweeper._remove_stray_outputs()
        service.enforce_retention()
        for name, id_ in made.items():
            assert [each["id"] for each in client.get("/v1/videos", headers=headers[name]).json()["data"]] == [id_]
            assert client.get(f"/v1/videos/{id_}/content", headers=headers[name]).content == contents[name]
    asides = list((tmp_path / ".comfy-tpu").glob("ledger.sqlite3.damaged-*"))
    assert bool(asides) == (damage is not Path.unlink)
    assert "remove" not in caplog.text
    assert "results.jsonl" not in caplog.text


def test_what_a_server_says_of_a_ledger_that_is_damaged_while_it_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(tmp_path) as (client, _, _):
        wait_for(client, create(client)["id"], "completed")
        with contextlib.closing(sqlite3.connect(tmp_path / LEDGER)) as other:
            while other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:  # while the server reads
                pass
        overwrite(tmp_path / LEDGER)
        assert client.post("/v1/videos", json={"prompt": "a cat"}).status_code == 503
        deadline = time.monotonic() + 20
        while client.get("/readyz").status_code == 200:  # until the scheduler meets it, too
            assert time.monotonic() < deadline
    assert "start the server again: it puts the ledger aside" in caplog.text
    assert "remove" not in caplog.text
    assert "results.jsonl" not in caplog.text


def test_files_that_cannot_be_opened_are_no_finished_jobs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ids = [f"{number:024x}" for number in range(4)]
    whole = write_video(tmp_path / f"video_{ids[0]}.mp4")
    Image.new("RGB", (64, 64), "red").save(tmp_path / f"image_{ids[0]}.png")
    image = (tmp_path / f"image_{ids[0]}.png").read_bytes()
    damaged = {
        "video": ("mp4", b"", whole[:-1], whole[: len(whole) // 2]),
        "image": ("png", b"", image[:-20], image[:40] + bytes(20)),
    }
    broken = [
        (f"{kind}_{id_}.{suffix}", content)
        for kind, (suffix, *contents) in damaged.items()
        for id_, content in zip(ids[1:], contents, strict=True)
    ]
    for name, content in broken:
        (tmp_path / name).write_bytes(content)
    for _ in range(2):  # the next start finds a ledger that is not new
        with contextlib.closing(open_ledger(tmp_path / "ledger.sqlite3", tmp_path)) as ledger:
            remove_stray_outputs(ledger, tmp_path)
            assert ledger.counts().total == 2
    for name, _ in broken:
        assert (tmp_path / name).exists()
        assert f"{name} is damaged" in caplog.text


def test_an_older_copy_of_a_ledger_sweeps_no_newer_files(tmp_path: Path) -> None:
    path, copy = tmp_path / "ledger.sqlite3", tmp_path / "copy"
    with contextlib.closing(ServedLedger(path)) as ledger:
        finish(ledger, "video_" + "0" * 24)
    shutil.copy(path, copy)
    newer = tmp_path / f"video_{'1' * 24}.mp4"
    newer.write_bytes(b"made after the copy")
    for latest in "23":  # jobs of the server with the old copy, and of the one after it
        shutil.copy(copy, path)
        with contextlib.closing(ServedLedger(path)) as ledger:
            remove_stray_outputs(ledger, tmp_path)
            finish(ledger, "video_" + latest * 24)
            remove_stray_outputs(ledger, tmp_path)
        shutil.copy(path, copy)
    assert newer.exists()


def test_files_of_jobs_that_were_removed_while_they_were_made(tmp_path: Path) -> None:
    id_ = "video_" + "0" * 24
    file = tmp_path / f"{id_}.mp4"
    with contextlib.closing(ServedLedger(tmp_path / "ledger.sqlite3")) as ledger:
        accept(ledger, id_)
        ledger.cancel(id_, "by the client")
        ledger.remove(id_)
        file.write_bytes(b"its worker was not done, and its server was killed")
        remove_stray_outputs(ledger, tmp_path)
    assert not file.exists()


def test_owners_that_a_server_before_did_not_write(tmp_path: Path) -> None:
    path, id_ = tmp_path / "ledger.sqlite3", "video_" + "0" * 24
    with contextlib.closing(ServedLedger(path)) as ledger:
        finish(ledger, id_, client="ann")
    owners_path(path).write_text('["video_1", "an')  # of a server that was killed
    ServedLedger(path).close()
    assert read_owners(path) == {id_: "ann"}
    lines = owners_path(path).read_text()
    ServedLedger(path).close()
    assert owners_path(path).read_text() == lines


def accept(ledger: ServedLedger, id_: str, client: str = "") -> None:
    job = NewJob(id_, 0, Request({"model": "demo", "prompt": "a cat"}), f"{id_}.mp4")
    ledger.accept(job, Order(client, "video", None, "", None), queue_limit=10)


def finish(ledger: ServedLedger, id_: str, client: str = "") -> None:
    accept(ledger, id_, client)
    (job,) = ledger.lease_fairly(1)
    ledger.start([job.id], "worker")
    assert ledger.finish(job.id, [OutputFile(job.output, "", 3)], {})


def test_a_file_tells_its_prompt_and_settings(tmp_path: Path) -> None:
    name = f"video_{1_700_000_000_000:012x}{'0' * 12}.mp4"
    write_video(tmp_path / name, model="demo", settings='{"seed": 7, "fps": 4, "other": 1}')
    with contextlib.closing(open_ledger(tmp_path / "ledger.sqlite3", tmp_path)) as ledger:
        record = ledger.find(name.partition(".")[0])
        assert record is not None
        assert record.request.values == {"prompt": "a cat", "model": "demo", "seed": 7, "fps": 4}
        assert (record.state, record.kind, record.created_at) == ("done", "video", 1_700_000_000.0)
        assert record.finished_at == pytest.approx((tmp_path / name).stat().st_mtime)


def test_a_fresh_ledger_sweeps_nothing_that_is_older(tmp_path: Path) -> None:
    stage = tmp_path / f"stage_{'0' * 24}.safetensors"
    stage.write_bytes(b"of the ledger before")
    os.utime(stage, (1.0, 1.0))
    with running(tmp_path) as (client, service, _):
        wait_for(client, create(client)["id"], "completed")
        service._sweeper._remove_stray_outputs()
        service.enforce_retention()
    assert stage.exists()


def test_a_damaged_ledger_that_another_server_has_open(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    with contextlib.closing(ServedLedger(path)) as other:
        other._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        path.write_bytes(os.urandom(8192))
        with pytest.raises(ComfyTpuError, match="is damaged, and another server has it open; end that one first"):
            open_ledger(path, tmp_path)
        assert path.exists()
