"""Where reading and trying differ, each corrects the other."""

import pytest

from comfy_tpu.porting.check import check
from comfy_tpu.porting.targets import find_targets


@pytest.fixture
def checked(tmp_path):
    def run(forward, inputs, **options):
        lines = ["import random", "", "import torch", "", "", "class Model(torch.nn.Module):"]
        lines += [f"    {line}" for line in forward.strip().splitlines()]
        (tmp_path / "model.py").write_text("\n".join(lines) + "\n")
        (target,) = find_targets(str(tmp_path / "model.py"))
        return check(target, inputs=inputs, **options)

    return run


def traps(done):
    return [(each.trap, each.line, each.reached) for each in done.findings]


def test_a_number_that_was_taken_for_a_tensor_is_forgiven(checked):
    forward = """
def forward(self, x, count):
    if count > 2:
        return x * count
    return x
"""
    inputs = {"x": [2, 3], "count": {"value": 3}}
    assert traps(checked(forward, None, static=True)) == [("tensor-condition", 8, None)]
    done = checked(forward, inputs)
    assert (done.verdict, traps(done)) == ("will run", [])
    inputs["count"] = {"value": 3, "dtype": "int64"}
    done = checked(forward, inputs)
    assert (done.verdict, traps(done)) == ("will not run", [("tensor-condition", 8, True)])


def test_a_line_that_was_not_reached_decides_nothing(checked):
    forward = """
def forward(self, x, by_value: bool = False):
    if by_value:
        return x * x.max().item()
    return x * x.max()
"""
    done = checked(forward, {"x": [2, 3]})
    assert (done.verdict, traps(done)) == ("will run", [("tensor-to-number", 9, False)])
    done = checked(forward, {"x": [2, 3], "by_value": True})
    assert (done.verdict, traps(done)) == ("will not run", [("tensor-to-number", 9, True)])


def test_operators_are_missed_in_one_pass_also_behind_a_line_that_ends_the_trace(checked):
    forward = """
def forward(self, x):
    y = torch.special.airy_ai(x)
    if y.sum() > 1e9:
        return x
    return torch.special.scaled_modified_bessel_k0(y.abs() + 1)
"""
    done = checked(forward, {"x": [2, 3]})
    assert done.verdict == "will not run"
    assert traps(done) == [("missing-operator", 8, True), ("tensor-condition", 9, True), ("missing-operator", 11, True)]


def test_another_result_than_pytorchs_is_told(checked):
    done = checked("def forward(self, x):\n    return x * random.random()\n", {"x": [2, 3]})
    assert done.verdict == "will not run"
    assert [trap for trap, _, _ in traps(done)] == ["parity", "python-random"]
    assert "differs from PyTorch by" in done.why


def test_nothing_of_the_trial_is_left_in_torch(checked):
    import sys

    import torch

    before = (sys.gettrace(), torch.get_default_dtype(), torch.get_rng_state().tolist())
    checked("def forward(self, x):\n    return x[x > 0]\n", {"x": [2, 3]})
    assert (sys.gettrace(), torch.get_default_dtype(), torch.get_rng_state().tolist()) == before
