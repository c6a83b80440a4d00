import pytest

from comfy_tpu.bench.job import DEVICES, PARTS, PEERS, SMALL_PEERS, Job
from comfy_tpu.bench.runner import PARTS as MEASURED
from comfy_tpu.bench.runner import list_jobs
from comfy_tpu.errors import InvalidValueError
from tests.bench.test_results import make_run


def test_every_part_has_a_function():
    assert set(MEASURED) == {*PARTS, DEVICES}


@pytest.mark.parametrize("name", ["repeats", "steps"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_counts_are_whole_numbers_from_1(name, value):
    with pytest.raises(InvalidValueError, match=rf"{name}={value} is not allowed; give a whole number from 1") as error:
        Job(**{name: value})
    assert error.value.field == name


def test_peers_that_no_part_has_are_refused():
    with pytest.raises(
        InvalidValueError, match="peers=fp8: nothing would be measured in text; choose from ours, eager"
    ) as e:
        Job(parts=("text",), peers=("fp8",))
    assert e.value.field == "peers"


def test_the_command_repeats_the_run():
    assert Job(parts=("vae",)).command == "comfy-tpu bench --what vae"
    choices = Job(parts=("end-to-end",), sizes=("480P",), model="demo", mesh="dp=2", steps=3, regional=True)
    assert choices.command == (
        "comfy-tpu bench --what end-to-end --size 480P --model demo --mesh dp=2 --steps 3 --compile-regional"
    )


def test_jobs_of_a_run():
    run = make_run(mesh="sp=8")
    made = list_jobs(Job(parts=("transformer", "text", "compile")), run, ["1x1x1", "2x2x2"])
    assert [(job.part, job.size, job.state) for job in made] == [
        ("transformer", "1x1x1", "cold"),
        ("transformer", "2x2x2", "cold"),
        ("text", "1x1x1", "cold"),
        ("compile", "1x1x1", "cold"),
        ("compile", "1x1x1", "warm"),
        ("compile", "2x2x2", "cold"),
        ("compile", "2x2x2", "warm"),
    ]
    assert {(job.model, job.mesh, job.peers) for job in made} == {(run.model, "sp=8", PEERS)}


def test_virtual_devices_are_for_small_models():
    small = make_run(model="small:x")
    assert [job.part for job in list_jobs(Job(parts=("scaling",)), small, ["1x1x1"])] == ["scaling", DEVICES]
    assert [job.part for job in list_jobs(Job(parts=("scaling",)), make_run(), ["1x1x1"])] == ["scaling"]
    assert list_jobs(Job(parts=("vae",)), small, ["1x1x1"])[0].peers == SMALL_PEERS
    assert list_jobs(Job(parts=("vae",), peers=("compile",)), small, ["1x1x1"])[0].candidates == ("compile",)
