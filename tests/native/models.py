"""Each architecture's model, and what TPU Compile Model makes of it; shared by the tests of one process."""

import functools
import types

import pytest

from tests.native.architectures import ARCHITECTURES

TABLE = "MODEL"
TOLERANCE = 1e-3
"""Relative, in float32."""
DECIBELS = 42
"""In bfloat16, where 45 and more are found; another prompt or seed gives 31 at most."""


def some_architectures(*names):
    """Tests of one architecture go to one process, which then compiles each program once."""
    chosen = [each for each in ARCHITECTURES if not names or each.name in names]
    assert len(chosen) == len(names or ARCHITECTURES), names
    return pytest.mark.parametrize(
        "architecture",
        [pytest.param(each, marks=pytest.mark.xdist_group(each.name)) for each in chosen],
        ids=lambda each: each.name.replace(" ", "_"),
    )


every_architecture = some_architectures()


@functools.cache
def models(architecture):
    """The model, and what the node makes of it, on one device and in float32."""
    model = architecture.build()
    return types.SimpleNamespace(plain=model, compiled=compile_model(model))


def compile_model(model, *, mesh="single", precision="float32", attention="auto"):
    from comfy_tpu.comfy.compile_nodes import TPUCompileModel

    return TPUCompileModel.execute(model, mesh=mesh, precision=precision, attention=attention).args[0]


def compare(architecture, cell, *args, change=lambda model: model, **options):
    """Samples with and without us; what ComfyUI gave. `change`: what nodes do to the model before ours."""
    from tests.native.sampling import relative_error, sample

    both = models(architecture)
    expected = sample(change(both.plain), architecture, *args, **options)
    error = relative_error(expected, sample(change(both.compiled), architecture, *args, **options))
    assert cell.error(error) < TOLERANCE
    return expected
