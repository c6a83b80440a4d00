"""What the node says and the panel shows, from what a pipeline tells. Needs no ComfyUI."""

import json
import logging

import jax.numpy as jnp
import pytest

from comfy_tpu.comfy import status as status_module
from comfy_tpu.comfy.fallbacks import NodeRun
from comfy_tpu.comfy.node_text import NodeText, duration_text, lines_as_json
from comfy_tpu.comfy.status import Status
from comfy_tpu.compiler import residency as residency_module
from comfy_tpu.compiler.residency import Residency
from comfy_tpu.config import MeshSizes, ResidencyConfig
from comfy_tpu.errors import MeshError
from comfy_tpu.parallel import mesh as mesh_module
from comfy_tpu.parallel.report import ReportGroup, ShardingReport
from comfy_tpu.pipeline.progress import Progress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def status(clock: Clock) -> Status:
    return Status(clock)


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (
            Progress("loading", "transformer", int(3.2e9), int(28.6e9), part="transformer"),
            "loading transformer 3.2 of 28.6 GB",
        ),
        (Progress("loading", "vae", 2_500_000, 10_300_000, part="vae"), "loading VAE 2.5 of 10.3 MB"),
        (Progress("loading", "", 1, 10_000_000, part="an_odd_one"), "loading an odd one 0.0 of 10.0 MB"),
        (Progress("loading", "Wan-AI/Wan2.1", 0, 0, model="Wan 2.1"), "loading Wan 2.1"),
        (Progress("compiling", "a.step", 0, 1, size="832×480×81"), "preparing for 832×480, 81 frames"),
        (
            Progress("compiling", "a.step", 0, 1, size="832×480×81", compiles=True),
            "compiling (first run at 832×480, 81 frames)",
        ),
        (Progress("compiling", "vae", 0, 1), "preparing"),
        (Progress("compiling", "vae", 1, 1, from_cache=True), "preparing"),
        (Progress("compiling", "vae", 0, 1, compiles=True), "compiling (first run)"),
        (Progress("compiling", "t5", 0, 1, size="512 tokens", compiles=True), "compiling (first run at 512 tokens)"),
        (Progress("encoding", "prompt", 0, 1), "encoding the prompt"),
        (Progress("encoding", "image", 0, 1), "encoding the image"),
        (Progress("denoising", "", 0, 50, size="832×480×81"), "832×480, 81 frames · step 0/50"),
        (Progress("denoising", "", 0, 50, size="1024×1024×1"), "1024×1024 · step 0/50"),
        (Progress("decoding", "", 3, 21, size="832×480×81"), "832×480, 81 frames · decoding 3/21"),
    ],
)
def test_lines(status: Status, progress: Progress, text: str) -> None:
    status.record(progress, "3")
    assert status.text() == text


def test_a_compilation_inside_the_first_step_is_not_the_steps_time(status: Status, clock: Clock) -> None:
    size = "832×480×81"
    for now, progress in [
        (0.0, Progress("denoising", "", 0, 50, size=size)),
        (0.5, Progress("compiling", "transformer.step", 0, 1, size=size)),
        (1.0, Progress("compiling", "transformer.step", 0, 1, size=size, compiles=True)),
        (21.0, Progress("compiling", "transformer.step", 1, 1, size=size, model="Wan 2.1", part="transformer")),
        (22.5, Progress("denoising", "", 1, 50, size=size)),
        (24.0, Progress("denoising", "", 2, 50, size=size)),
    ]:
        clock.now = now
        status.record(progress, "3")
    assert status.text() == "832×480, 81 frames · step 2/50 · 1.50 s/step · 1:12 left"
    now = status.snapshot()
    assert now["step_seconds"] == 1.5
    assert now["eta_seconds"] == 72.0
    place = {"model": "", "part": "", "size": size, "node": "3"}
    assert now["activity"] == {"stage": "denoising", "what": size, "done": 2, "total": 50, **place}
    assert now["compiled"] == {
        "programs": 1,
        "from_cache": 0,
        "seconds": 20.0,
        "last": f"transformer.step at {size}",
        "latest": {"model": "Wan 2.1", "part": "transformer", "size": size},
    }


def test_a_reused_step_says_nothing_of_a_steps_time(status: Status, clock: Clock) -> None:
    for done, now in enumerate((0.0, 2.0, 2.0, 2.0, 4.0)):
        clock.now = now
        status.record(Progress("denoising", "", done, 5, size="a", reused=done in (2, 3)), None)
    assert status.text() == "a · step 4/5 · 2.00 s/step · 0:02 left"


def test_a_program_from_the_cache_is_not_a_compilation(status: Status, clock: Clock) -> None:
    status.record(Progress("compiling", "vae.decode", 0, 1, size="x"), None)
    clock.now = 2.0
    status.record(Progress("compiling", "vae.decode", 1, 1, size="x", from_cache=True), None)
    compiled = {"programs": 0, "from_cache": 1, "seconds": 0.0, "last": None, "latest": None}
    assert status.snapshot()["compiled"] == compiled


def test_a_new_run_forgets_the_steps_of_the_last(status: Status, clock: Clock) -> None:
    status.record(Progress("denoising", "", 0, 2, size="a"), None)
    clock.now = 9.0
    status.record(Progress("denoising", "", 1, 2, size="a"), None)
    status.record(Progress("denoising", "", 0, 2, size="b"), None)
    assert status.snapshot()["step_seconds"] is None


def test_the_last_step_leaves_nothing(status: Status, clock: Clock) -> None:
    status.record(Progress("denoising", "", 0, 1, size="a"), None)
    clock.now = 2.0
    status.record(Progress("denoising", "", 1, 1, size="a"), None)
    assert status.text() == "a · step 1/1 · 2.00 s/step"


@pytest.mark.parametrize(
    ("seconds", "text"), [(12.34, "done in 12.3 s"), (64, "done in 1:04"), (3661, "done in 1:01:01")]
)
def test_how_long_a_node_took(seconds: float, text: str) -> None:
    assert str(NodeText("node.done", {"time": duration_text(seconds)})) == text


def test_hours_are_shown_as_hours(status: Status, clock: Clock) -> None:
    status.record(Progress("denoising", "", 0, 100, size="a"), None)
    clock.now = 60.0
    status.record(Progress("denoising", "", 1, 100, size="a"), None)
    assert status.text().endswith("60.00 s/step · 1:39:00 left")


def test_before_a_node_ran_no_device_is_asked(status: Status) -> None:
    now = status.snapshot()
    assert (now["started"], now["platform"], now["devices"], now["resident"]) == (False, None, [], [])


def test_devices_are_told_once_started(status: Status) -> None:
    status.start()
    now = status.snapshot()
    assert now["platform"] == "cpu"
    assert {"id", "kind", "weights_bytes", "used_bytes", "limit_bytes"} == set(now["devices"][0])
    assert status.report().splitlines()[0] == f"{len(now['devices'])} cpu devices"


def test_the_report_can_be_translated(status: Status) -> None:
    """Every line is a key with values, of which the English text is made."""
    status.start()
    status.fallbacks.record(NodeRun("7", "p"), "UNet", "it cannot be traced")
    lines = status.report_lines()
    assert all(isinstance(line[0], NodeText) and line[0].key.startswith("info.") for line in lines)
    sent = json.loads(json.dumps(lines_as_json(lines)))
    assert sent[-1] == [
        {"key": "info.on_host_node", "values": {"what": "UNet", "reason": "it cannot be traced", "node": "7"}}
    ]
    assert status.report().splitlines()[-1] == "on the host: UNet (node 7): it cannot be traced"


def test_at_rest_nothing_goes_on(status: Status) -> None:
    status.record(Progress("decoding", "", 1, 2, size="a"), "3")
    status.set_idle()
    assert status.text() == ""
    assert status.snapshot()["activity"]["stage"] == "idle"


REPORT = ShardingReport(
    MeshSizes(dp=2, sp=4),
    sharded=ReportGroup(0, 0, 0),
    gathered=ReportGroup(17, 28_000_000_000, 7_000_000_000),
    replicated=ReportGroup(25, 13_000_000, 13_000_000),
    could_not_split=("patch.weight",),
)


def test_how_weights_are_split_is_logged_shown_and_given_to_the_panel(
    status: Status, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    residency = Residency(ResidencyConfig(budget_bytes=10**9))
    monkeypatch.setattr(residency_module, "shared_residency", lambda: residency)
    status.start()
    arguments = {"label": "demo transformer", "nbytes_per_device": 8, "load": lambda: {"w": jnp.ones(2)}}
    with caplog.at_level(logging.INFO), residency.use("a", **arguments, sharding=REPORT):
        pass
    lines = [
        "mesh dp=2,sp=4,tp=1: 42 tensors, 28.0 GB, 7.01 GB of it on each device; 0 split (0 MB), "
        "17 stored in pieces and gathered (28.0 GB), 25 replicated (13 MB)",
        "could not be split, because no dimension divides: patch.weight",
    ]
    assert "demo transformer is loaded; " + "\n".join(lines) in caplog.messages
    (entry,) = status.snapshot()["resident"]
    assert entry["sharding"] == REPORT.as_dict()
    report = status.report().splitlines()
    shown = report.index("resident: demo transformer, 0.0 MB")
    assert report[shown + 1 : shown + 3] == [f"  {line}" for line in lines]
    with residency.use("b", **{**arguments, "label": "something else"}):
        pass
    assert [entry["sharding"] for entry in status.snapshot()["resident"]] == [REPORT.as_dict(), None]


def test_a_tpu_that_another_process_holds_is_no_cpu(status: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    """TPU Info says so, and the panel asks no device."""

    def find_devices() -> None:
        raise MeshError("this machine has a TPU (/dev/accel0), but it is held by process 4711")

    monkeypatch.setattr(mesh_module, "find_devices", find_devices)
    monkeypatch.setattr(status_module, "_devices", lambda: pytest.fail("a device was asked"))
    with pytest.raises(MeshError, match="held by process 4711"):
        status.start()
    assert status.snapshot()["started"] is False
