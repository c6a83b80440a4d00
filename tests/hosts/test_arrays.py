"""Arrays over the devices of two processes."""

import json
from pathlib import Path

from tests.hosts.processes import find_port, start, wait_all

SCRIPT = Path(__file__).with_name("arrays_script.py")


def test_arrays_over_two_processes(tmp_path):
    port = find_port()
    processes = [start(SCRIPT, str(number), str(port), str(tmp_path), cwd=tmp_path) for number in range(2)]
    for number, (status, out, err) in enumerate(wait_all(processes)):
        assert status == 0, err
        found = json.loads(out.splitlines()[-1])
        assert found.pop("error") < 1e-5
        assert found == {
            "devices": [4, 2],
            "first": number == 0,
            "processes": [[[0, 0]], [[1, 1]]],  # dp between the hosts, tp inside
            "round trip": True,
            "replicated": True,
            "integers": [0, 1, 2, 3],
            # Of 48 elements, those of two devices.
            "cut to keep": 24,
            "cut to use": 24,
            "shards": [2, 2],
            "placed": True,
        }
