"""Where reading and trying differ, each corrects the other."""

import pytest

from comfy_tpu.porting.check import check
from comfy_tpu.porting.report import format_text
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


def test_a_tensor_in_a_text_does_not_end_the_operators_and_what_does_is_told(checked):
    forward = """
def forward(self, x):
    name = f"{x.mean():.2f}"
    y = torch.special.airy_ai(x)
    assert type(y) is torch.Tensor
    return torch.special.scaled_modified_bessel_k0(y)
"""
    done = checked(forward, {"x": [2, 3]})
    assert traps(done) == [("tensor-to-number", 8, True), ("missing-operator", 9, True)]
    assert done.trial.operators_end.endswith("model.py:10: AssertionError")


def test_a_kept_tensor_is_found_also_behind_a_line_that_ends_the_trace(checked):
    forward = """
kept = {}
def forward(self, x):
    table = Model.kept.setdefault("ones", torch.ones(3, device=x.device))
    y = x * table
    if y.sum() > 1e9:
        return x
    return y * y.max().item()
"""
    done = checked(forward, {"x": [2, 3]})
    assert done.verdict == "will not run"
    found = [("kept-tensor", 10, True), ("tensor-condition", 11, True), ("tensor-to-number", 13, None)]
    assert traps(done) == found


def test_a_kept_tensor_is_found_where_it_is_only_returned(checked):
    forward = """
kept = {}
def forward(self, x):
    return x, Model.kept.setdefault("ones", torch.ones(3, device=x.device))
"""
    done = checked(forward, {"x": [2, 3]})
    assert done.verdict == "will not run"
    assert [trap for trap, _, _ in traps(done)] == ["kept-tensor"]
    assert done.why == "it returns a tensor that an earlier trace has made"


def test_another_result_than_pytorchs_is_told(checked):
    done = checked("def forward(self, x):\n    return x * random.random()\n", {"x": [2, 3]})
    assert done.verdict == "will not run"
    assert [trap for trap, _, _ in traps(done)] == ["parity", "python-random"]
    assert "differs from PyTorch by" in done.why


def test_numbers_beside_tensors_are_compared_and_keys_of_a_dict_find_each_other(checked):
    done = checked("def forward(self, x):\n    return {'b': x[0], 'a': (x, 3), 'none': None}\n", {"x": [2, 3]})
    assert (done.verdict, traps(done)) == ("will run", [])


def test_another_number_of_results_is_not_the_compilers_fault(checked):
    forward = """
def forward(self, x):
    return (x, x) if type(x) is torch.Tensor else x
"""
    done = checked(forward, {"x": [2, 3]})
    assert done.verdict == "will not run"
    assert done.why == "the compiled program returns shapes [(2, 3)], PyTorch [(2, 3), (2, 3)]"


def test_what_has_no_line_is_said_without_one(checked):
    done = checked("def forward(self, x):\n    return {'x': x, 'name': 'three'}\n", {"x": [2, 3]})
    assert (done.verdict, traps(done)) == ("will not run", [("results", 0, True)])
    assert done.why.startswith("the model returned a str, expected tensors")
    text = format_text([done])
    assert ":0" not in text
    assert "see: docs/porting.md#results" in text


@pytest.mark.parametrize(
    ("result", "says"), [("None", "returns no tensor"), ("x[:0]", "returns no tensor"), ("x / 0", "NaN or infinity")]
)
def test_a_result_that_cannot_be_compared_is_not_tried(checked, result, says):
    done = checked(f"def forward(self, x):\n    return {result}\n", {"x": [2, 3]})
    assert (done.verdict, done.blocked) == ("not tried", True)
    assert says in done.why


@pytest.mark.parametrize(
    ("result", "options", "status"),
    [
        ("x * 2", {}, "pass"),
        ("x * 2", {"static": True}, "not applicable"),
        ("x[x > 0]", {}, "not applicable"),
        ("x.double()", {"static": True}, "fail"),
    ],
)
def test_dtypes_pass_only_where_bfloat16_was_tried(checked, result, options, status):
    done = checked(f"def forward(self, x):\n    return {result}\n", {"x": [2, 3]}, **options)
    (item,) = [item for item in done.before if item.text == "Dtypes stay what they were given"]
    assert item.status == status


def test_nothing_of_the_trial_is_left_in_torch(checked):
    import sys

    import torch

    before = (sys.gettrace(), torch.get_default_dtype(), torch.get_rng_state().tolist())
    checked("def forward(self, x):\n    return x[x > 0]\n", {"x": [2, 3]})
    assert (sys.gettrace(), torch.get_default_dtype(), torch.get_rng_state().tolist()) == before
