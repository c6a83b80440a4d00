import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from comfy_tpu.errors import ShardingError
from comfy_tpu.parallel.constraints import constrain
from comfy_tpu.parallel.mesh import make_placement


def test_constraint_reaches_the_compiled_program():
    placement = make_placement("dp=2,sp=4")
    out = jax.jit(lambda x: constrain(x * 2, placement, P("dp", "sp")))(jnp.ones((2, 8)))
    assert out.sharding.is_equivalent_to(placement.sharding("dp", "sp"), 2)


def test_length_that_does_not_divide_inside_jit():
    placement = make_placement("sp=8")
    x = jnp.arange(77.0 * 3).reshape(77, 3)

    @jax.jit
    def f(x):
        y = constrain(jnp.sin(x), placement, P("sp"))
        return jnp.flip(y, 0) + y.sum(0), y

    text = f.lower(x).as_text()
    assert '[{"sp"' in text
    assert "77x3" in text
    out, _ = f(x)
    expected = np.flip(np.sin(x), 0) + np.sin(x).sum(0)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_one_device_is_untouched():
    placement = make_placement("single")
    x = jnp.ones(7)
    assert constrain(x, placement, P("sp")) is x


def test_bad_constraints():
    placement = make_placement("dp=2,sp=4")
    x = jnp.ones((2, 7))
    with pytest.raises(ShardingError, match="unknown mesh axis 'pp'; choose from dp, sp, tp"):
        constrain(x, placement, P("pp"))
    with pytest.raises(
        ShardingError, match=r"names 3 dimensions but the array has 2, shape \(2, 7\); give at most one"
    ):
        constrain(x, placement, P(None, None, "sp"))
    with pytest.raises(ShardingError, match="axis 'dp' is used twice; use each axis once"):
        constrain(x, placement, P("dp", ("dp", "sp")))
    with pytest.raises(ShardingError, match="dimension 1 is 7, not divisible by 4; outside jax.jit sizes must divide"):
        constrain(x, placement, P("dp", "sp"))
    with pytest.raises(ShardingError, match="unknown mesh axis 'pp'"):
        constrain(x, make_placement("single"), P("pp"))
