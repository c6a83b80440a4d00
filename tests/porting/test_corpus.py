"""Small models, one for every trap, each with a twin that does the same without it.

`# trap: name` marks a line that reading finds, `# trial: name` one that takes a run.
"""

import re
from pathlib import Path

import pytest

from comfy_tpu.porting.check import check
from comfy_tpu.porting.targets import find_targets
from comfy_tpu.porting.traps import TRAPS

CORPUS = Path(__file__).parent / "corpus"
MODELS = sorted(path.stem for path in CORPUS.glob("*.py"))
TRAPPED = [name for name in MODELS if name != "innocent"]
INPUTS = {"x": [2, 4, 8]}
NOT_BY_THEMSELVES = {"trace", "lowering", "parity", "results"}
"""What a trial says where no trap has a name for it, or no line."""


def marked(name, *marks):
    lines = (CORPUS / f"{name}.py").read_text().splitlines()
    found = set()
    for number, line in enumerate(lines, 1):
        match = re.search(rf"# ({'|'.join(marks)}): (\S+)$", line)
        if match:
            found.add((match[2], number))
    return found


def target(name, model):
    (found,) = find_targets(f"{CORPUS / name}.py:{model}")
    return found


def places(findings):
    assert all(Path(finding.file).parent == CORPUS for finding in findings)
    return {(finding.trap, finding.line) for finding in findings}


def test_every_trap_is_in_the_corpus():
    met = {trap for name in TRAPPED for trap, _ in marked(name, "trap", "trial")}
    assert met == set(TRAPS) - NOT_BY_THEMSELVES


@pytest.mark.parametrize("name", TRAPPED)
def test_reading_finds_every_trap_at_its_line(name):
    done = check(target(name, "Trapped"), static=True)
    assert places(done.findings) == marked(name, "trap")
    assert done.blocked == any(finding.severity == "stops" for finding in done.findings)


@pytest.mark.parametrize("name", MODELS)
def test_reading_says_nothing_about_the_twin(name):
    done = check(target(name, "Mended"), static=True)
    assert places(done.findings) == set()
    assert not done.blocked


@pytest.mark.parametrize("name", MODELS)
def test_the_twin_runs_and_nothing_is_said(name):
    done = check(target(name, "Mended"), inputs=INPUTS)
    assert places(done.findings) == set()
    assert done.verdict == "will run", done.why
    assert {item.status for item in (*done.before, *done.after)} <= {"pass", "not applicable"}


@pytest.mark.default_cases(
    "complex",
    "cuda",
    "distributed",
    "dtype_drift",
    "float64",
    "gpu_only_import",
    "host_tensor_written",
    "kept_tensor",
    "large_constant",
    "mask_indexing_in_place",
    "meta_tensor",
    "missing_operator",
    "no_sharding_rule",
    "python_random",
    "random_in_forward",
    "square_mask",
    "square_mask_from_outside",
    "strided_write",
    "tensor_assert",
    "tensor_condition",
    "tensor_condition_in_helper",
    "uneven_blocks",
)
@pytest.mark.parametrize("name", TRAPPED)
def test_a_trial_keeps_what_was_read_and_adds_what_only_it_can_see(name):
    done = check(target(name, "Trapped"), inputs=INPUTS)
    found = {place for place in places(done.findings) if place[0] != "trace"}
    assert found == marked(name, "trap", "trial")
    assert done.blocked == any(TRAPS[trap].severity == "stops" for trap, _ in found)
