import dataclasses

from comfy_tpu.diagnosis.hosts import HostFacts, check_hosts

CPU = HostFacts(0, "a", "cpu", 2, "cpu", ())


def test_equal_hosts():
    found = check_hosts((CPU, dataclasses.replace(CPU, process=1, host="b")))
    assert found.status == "ok"
    assert found.detail == (
        "2 processes; 0 a: 2 × cpu, 1 b: 2 × cpu; together 4 devices, so a mesh has sizes whose product is 4"
    )


def test_a_host_with_other_devices():
    tpus = [HostFacts(number, f"tpu-{number}", "tpu", 4, "TPU v6 lite", ()) for number in range(3)]
    found = check_hosts((*tpus, dataclasses.replace(CPU, process=3)))
    assert found.status == "warning"
    assert found.detail.endswith("3 a: 2 × cpu; process 3 differs from most others")


def test_a_host_that_cannot_run():
    broken = HostFacts(1, "b", None, 0, "", ("devices: jax could not start the TPU",))
    found = check_hosts((CPU, broken))
    assert found.status == "blocked"
    assert found.detail.endswith("1 b: no device; process 1: devices: jax could not start the TPU")
    assert found.fix == "run `comfy-tpu doctor` on b, and do what it says there"
