"""Changes of weights on their devices: where they lie, what is compiled for them, and what goes between devices."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding
from safetensors.torch import save_file

from comfy_tpu.compiler import merging as module
from comfy_tpu.compiler.cache import count_compilations
from comfy_tpu.compiler.checkpoint import Checkpoint
from comfy_tpu.compiler.merging import DeviceMerge, MergedSource, WeightChange, merge
from comfy_tpu.compiler.weights import WeightSlot, load_weights
from comfy_tpu.parallel.mesh import make_placement

LAYERS, OUTPUTS, INPUTS = 3, 16, 24
FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(jnp.bfloat16)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def write(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, path)
    return path


class Changes(dict[str, WeightChange]):
    closed = 0
    reads_weights = False

    def read(self, name: str) -> WeightChange:
        return self[name]

    def close(self) -> None:
        self.closed += 1


def low_rank(rank: int, seed: int = 0) -> WeightChange:
    return WeightChange(random(OUTPUTS, rank, seed=seed), random(rank, INPUTS, seed=seed + 1))


def put(mesh: str, *axes: str | None, dtype: np.dtype = FLOAT32) -> jax.Array:
    sharding = make_placement(mesh, platform="cpu").sharding(*axes)
    return jax.device_put(random(OUTPUTS, INPUTS, seed=9).numpy().astype(dtype), sharding)


@pytest.mark.parametrize("axes", [("tp", None), (None, "tp"), (("dp", "tp"), None), ("dp", "tp"), ()], ids=str)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_the_weight_keeps_its_place_and_dtype(axes: tuple[str | None, ...], dtype: np.dtype) -> None:
    array = put("dp=2,tp=4", *axes, dtype=dtype)
    change = dataclasses.replace(low_rank(5), difference=random(OUTPUTS, INPUTS, seed=7))
    merged = merge(array, change)
    assert (merged.sharding, merged.dtype) == (array.sharding, array.dtype)
    expected = change.add_to(torch.from_numpy(np.array(array, np.float32))).numpy()
    np.testing.assert_allclose(np.asarray(merged, np.float32), expected, rtol=1e-5 if dtype == FLOAT32 else 2**-8)


@pytest.mark.parametrize("axes", [("tp", None), (None, "tp"), (("dp", "tp"), None)], ids=str)
def test_nothing_goes_between_devices(axes: tuple[str | None, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []

    def spied(sharding: NamedSharding) -> Callable[..., jax.Array]:
        def call(*arrays: jax.Array | None) -> jax.Array:
            program = merger(sharding).lower(*arrays).compile()
            texts.append(program.as_text())
            return program(*arrays)

        return call

    merger = module._merger
    monkeypatch.setattr(module, "_merger", spied)
    merge(put("dp=2,tp=4", *axes), low_rank(4))
    (text,) = texts
    assert "dot" in text
    assert not [word for word in ("all-gather", "all-reduce", "all-to-all", "collective") if word in text]


def test_ranks_share_programs() -> None:
    array = put("single")
    merge(array, low_rank(1))
    with count_compilations() as count:
        for rank in (2, 8, 15, 16):
            merge(array, low_rank(rank))
    assert count.requested == 0
    with count_compilations() as count:
        for rank in (17, 24, 32):
            merge(array, low_rank(rank))
    assert count.requested == 1


@pytest.mark.parametrize("layers", [1, LAYERS])
def test_stacks_get_the_change_of_each_layer(layers: int, tmp_path: Path) -> None:
    names = [f"blocks.{index}.w" for index in range(layers)]
    tensors = {name: random(OUTPUTS, INPUTS, seed=index) for index, name in enumerate(names)}
    path = write(tmp_path / "base.safetensors", tensors)
    changes = Changes({names[-1]: low_rank(3)})
    sharding = make_placement("dp=2,tp=4", platform="cpu").sharding(None, "tp", None)
    slot = WeightSlot("blocks.*.w", tuple(names), (layers, OUTPUTS, INPUTS), FLOAT32, sharding)
    (array,) = load_weights(Checkpoint.open(path), [slot], change=DeviceMerge(changes)).values()
    assert array.sharding == sharding
    for index, name in enumerate(names):
        expected = changes[name].add_to(tensors[name]) if name in changes else tensors[name]
        np.testing.assert_allclose(np.asarray(array)[index], expected.numpy(), rtol=1e-5)
    source = MergedSource(Checkpoint.open(path), changes)
    assert torch.equal(source.read(names[-1]), changes[names[-1]].add_to(tensors[names[-1]]))
    source.close()
    assert changes.closed == 1


def test_a_change_that_cannot_be_read_leaves_nothing_on_the_devices(tmp_path: Path) -> None:
    class Broken(Changes):
        def read(self, name: str) -> WeightChange:
            raise RuntimeError("the file is gone")

    path = write(tmp_path / "base.safetensors", {"a": torch.ones(4), "b": torch.ones(4)})
    sharding = make_placement("single", platform="cpu").sharding()
    slots = [WeightSlot(name, (name,), (4,), FLOAT32, sharding) for name in ("a", "b")]
    before = len(jax.live_arrays())
    with pytest.raises(RuntimeError, match="the file is gone"):
        load_weights(Checkpoint.open(path), slots, change=DeviceMerge(Broken(b=WeightChange())))
    assert len(jax.live_arrays()) <= before
