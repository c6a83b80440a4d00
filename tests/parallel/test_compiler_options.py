"""Options of single compilations."""

import logging

import jax
import pytest

from comfy_tpu.config import MeshSizes
from comfy_tpu.parallel.chips import CHIPS
from comfy_tpu.parallel.compiler_options import choose_compiler_options, compile_lowered

GATHERS = "xla_tpu_enable_sparse_core_collective_offload_all_gather"
PRELOADED = "xla_tpu_sparse_core_maximum_preloaded_async_calls"
EXCHANGES = "xla_tpu_enable_async_all_to_all"


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)


@pytest.mark.parametrize("chip", CHIPS)
def test_collectives_of_sequence_parallelism_run_beside_other_work(chip):
    options = choose_compiler_options("tpu", chip, MeshSizes(dp=2, sp=4))
    assert options[EXCHANGES] is True
    assert (GATHERS in options) == (chip == "v6e"), "the other compilers do without the option, or ignore it"


@pytest.mark.parametrize(
    ("platform", "chip", "sizes"),
    [
        ("tpu", "v6e", MeshSizes(dp=2, tp=4)),
        ("tpu", "v6e", None),
        ("tpu", "an unknown chip", MeshSizes(sp=8)),
        ("cpu", "cpu", MeshSizes(sp=8)),
    ],
)
def test_other_programs_have_none(platform, chip, sizes):
    assert choose_compiler_options(platform, chip, sizes) == {}


def test_programs_for_v7x_can_be_printed():
    assert list(choose_compiler_options("tpu", "v7x", MeshSizes(tp=8))) == [PRELOADED]
    assert choose_compiler_options("tpu", "v7x", MeshSizes(sp=8))[PRELOADED] == "0"


@pytest.mark.parametrize("flag", [f"--{EXCHANGES}=false", f"--no{EXCHANGES}", f"--{EXCHANGES}"])
def test_what_libtpu_is_told_in_the_environment_stays(flag, monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--mine=1 {flag}")
    options = choose_compiler_options("tpu", "v6e", MeshSizes(sp=8))
    assert EXCHANGES not in options
    assert options[GATHERS] is True


def test_an_option_that_the_compiler_does_not_know_is_left_out(caplog):
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    with caplog.at_level(logging.INFO):
        compiled = compile_lowered(lowered, {"xla_not_an_option": True, "xla_cpu_enable_fast_math": False})
    assert compiled(1.0) == 2.0
    assert "does not know xla_not_an_option" in caplog.text


def test_other_refusals_are_raised():
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    with pytest.raises(jax.errors.JaxRuntimeError):
        compile_lowered(lowered, {"xla_cpu_enable_fast_math": "neither"})
