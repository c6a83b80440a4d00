"""Which kernel a call takes, and what is refused with which words."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest

from comfy_tpu.config import AttentionConfig, BlockSizes, MeshSizes, Platform
from comfy_tpu.errors import InvalidValueError, UnsupportedError
from comfy_tpu.kernels import attention, cudnn, hopper
from comfy_tpu.kernels.choice import Call, choose_implementation, choose_strategy
from comfy_tpu.kernels.masking import Band
from comfy_tpu.kernels.tuning import DEFAULT, block_sizes, tuned_tiles, untuned_tile
from tests.kernels.attention_reference import absent_placement

LONG = Call(heads=40, queries=32_760, keys=32_760, head_dim=128, value_dim=128, dtype=jnp.bfloat16)
AUTO = AttentionConfig()


@pytest.fixture
def with_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "is_installed", lambda: True)
    monkeypatch.setattr(hopper, "is_installed", lambda: False)


@pytest.fixture
def with_pallas(with_cudnn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "is_installed", lambda: True)


def choice(call: Call, platform: Platform, chip: str, config: AttentionConfig = AUTO, sharded: Any = None) -> str:
    return choose_implementation(call, platform, chip, config, sharded=sharded)


def test_long_calls_on_each_platform(with_cudnn: None) -> None:
    assert choice(LONG, "tpu", "v6e") == "splash"
    assert choice(LONG, "gpu", "h200") == "cudnn"
    assert choice(LONG, "cpu", "cpu") == "chunked"


def test_short_calls_are_dense_but_for_cudnn(with_cudnn: None) -> None:
    short = dataclasses.replace(LONG, queries=4096, keys=4096)
    assert choice(short, "tpu", "v6e") == "dense"
    assert choice(short, "cpu", "cpu") == "dense"
    assert choice(short, "gpu", "h200") == "cudnn"
    assert choice(dataclasses.replace(short, keys=4097), "tpu", "v6e") == "splash"
    assert choice(dataclasses.replace(short, queries=1, keys=4097), "cpu", "cpu") == "chunked"
    assert choice(dataclasses.replace(short, queries=75_600, keys=512), "tpu", "v6e") == "splash"
    assert choice(short, "cpu", "cpu", AttentionConfig(dense_max_tokens=100)) == "chunked"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"dtype": jnp.float16}, "cudnn"),
        ({"dtype": jnp.float32}, "chunked"),
        ({"head_dim": 256, "value_dim": 256}, "cudnn"),
        ({"head_dim": 264, "value_dim": 264}, "chunked"),
        ({"head_dim": 44, "value_dim": 44}, "chunked"),
        ({"value_dim": 64}, "chunked"),
        ({"band": Band(None, 0)}, "cudnn"),
        ({"band": Band(100, 0)}, "cudnn"),
        ({"band": Band(100, 0), "keys": 10_000}, "chunked"),
        ({"band": Band(100, 100)}, "chunked"),
        ({"key_mask": "bool"}, "cudnn"),
        ({"key_mask": "bool", "band": Band(None, 0)}, "chunked"),
        ({"key_mask": "float"}, "chunked"),
        ({"dense_mask": True}, "chunked"),
    ],
)
def test_what_cudnn_takes(with_cudnn: None, change: dict[str, Any], expected: str) -> None:
    assert choice(dataclasses.replace(LONG, **change), "gpu", "h200") == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "hopper"),
        ({"dtype": jnp.float16}, "hopper"),
        ({"head_dim": 64, "value_dim": 64}, "hopper"),
        ({"queries": 4096, "keys": 4096}, "hopper"),
        ({"keys": 4095}, "cudnn"),
        ({"head_dim": 256, "value_dim": 256}, "cudnn"),
        ({"head_dim": 96, "value_dim": 96}, "cudnn"),
        ({"band": Band(None, 0)}, "cudnn"),
        ({"key_mask": "bool"}, "hopper"),
        ({"has_lengths": True}, "hopper"),
        ({"has_lengths": True, "band": Band(None, 0)}, "cudnn"),
        ({"key_mask": "float"}, "chunked"),
        ({"dtype": jnp.float32}, "chunked"),
    ],
)
def test_what_our_hopper_kernel_takes(with_pallas: None, change: dict[str, Any], expected: str) -> None:
    assert choice(dataclasses.replace(LONG, **change), "gpu", "h200") == expected


def test_our_hopper_kernel_depends_on_chip_and_strategy(with_pallas: None) -> None:
    assert choice(LONG, "gpu", "h100", sharded="whole_keys") == "hopper"
    assert choice(LONG, "gpu", "b200") == "cudnn"
    assert choice(LONG, "gpu", "a100") == "cudnn"
    assert choice(LONG, "gpu", "h200", sharded="ring") == "chunked"
    assert choice(LONG, "gpu", "h200", AttentionConfig(implementation="cudnn")) == "cudnn"


def test_our_hopper_kernel_needs_pallas_for_gpus(with_cudnn: None) -> None:
    assert choice(LONG, "gpu", "h200") == "cudnn"
    with pytest.raises(UnsupportedError, match=r"needs JAX's CUDA plugin and absl-py: .*\[cuda\]'; or"):
        choice(LONG, "gpu", "h200", AttentionConfig(implementation="hopper"))


def test_cudnn_depends_on_chip_strategy_and_plugin(with_cudnn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choice(dataclasses.replace(LONG, head_dim=256, value_dim=256), "gpu", "a100") == "chunked"
    assert choice(LONG, "gpu", "h200", sharded="ring") == "chunked"
    assert choice(LONG, "gpu", "h200", sharded="whole_keys") == "cudnn"
    assert choice(dataclasses.replace(LONG, band=Band(None, 0)), "gpu", "h200", sharded="whole_keys") == "chunked"
    monkeypatch.setattr(cudnn, "is_installed", lambda: False)
    assert choice(LONG, "gpu", "h200") == "chunked"


@pytest.mark.parametrize(
    ("change", "expected"),
    [({"dense_mask": True}, "chunked"), ({"key_mask": "float"}, "splash"), ({"dtype": jnp.float16}, "chunked")],
)
def test_what_splash_takes(change: dict[str, Any], expected: str) -> None:
    assert choice(dataclasses.replace(LONG, **change), "tpu", "v6e") == expected


@pytest.mark.parametrize(
    ("call", "platform", "name", "message"),
    [
        (
            LONG,
            "gpu",
            "splash",
            'implementation="splash" cannot take this call: it is a TPU kernel .* choose cudnn or chunked',
        ),
        (LONG, "tpu", "cudnn", "it runs on NVIDIA GPUs and the placement is tpu; choose auto or chunked"),
        (LONG, "cpu", "cudnn", "the placement is cpu"),
        (LONG, "tpu", "hopper", "it runs on h100, h200, gh200 and the placement is v6e; choose auto or cudnn"),
        (
            dataclasses.replace(LONG, dense_mask=True),
            "tpu",
            "splash",
            r"pass a mask of shape \[B, 1, 1, Lk\], kv_lengths",
        ),
        (
            dataclasses.replace(LONG, dtype=jnp.float16),
            "tpu",
            "splash",
            "dtype is float16; expected bfloat16 or float32",
        ),
        (
            dataclasses.replace(LONG, dtype=jnp.float32),
            "gpu",
            "cudnn",
            "dtype is float32; expected bfloat16 or float16",
        ),
        (dataclasses.replace(LONG, head_dim=44), "gpu", "cudnn", r"head_dim is 44 \(values 128\); .* a multiple of 8"),
    ],
)
def test_forcing_the_impossible(with_cudnn: None, call: Call, platform: Platform, name: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        choice(call, platform, "v6e", AttentionConfig(implementation=name))


def test_strategies() -> None:
    def strategy(call: Call, platform: Platform = "tpu", config: AttentionConfig = AUTO, **sizes: int) -> str:
        return choose_strategy(call, platform, MeshSizes(**sizes), config)

    assert strategy(LONG, sp=4) == "ulysses"
    assert strategy(LONG, sp=4, tp=8) == "ring"
    assert strategy(LONG, "gpu", sp=3) == "whole_keys"
    assert strategy(LONG, sp=4, config=AttentionConfig(sequence_parallel="ring")) == "ring"
    assert strategy(dataclasses.replace(LONG, keys=512), sp=3) == "whole_keys"
    assert strategy(dataclasses.replace(LONG, keys=8192), sp=4) == "ulysses"
    assert strategy(dataclasses.replace(LONG, dense_mask=True), sp=4) == "whole_keys"


def array(*shape: int, dtype: Any = jnp.float32) -> jnp.ndarray:
    return jnp.zeros(shape, dtype)


Q = array(2, 4, 8, 16)


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        (
            (array(4, 8, 16), Q, Q),
            {},
            r"^query has 3 dimensions, shape \(4, 8, 16\); expected \[batch, heads, length, head_dim\]",
        ),
        ((Q, array(2, 4, 8, 12), Q), {}, "^query has head_dim=16 and key head_dim=12; they must be equal$"),
        ((Q, Q, array(2, 4, 9, 16)), {}, r"^key has \[batch, heads, length\] = \[2, 4, 8\] and value \[2, 4, 9\]"),
        ((Q, array(2, 2, 8, 16), array(2, 2, 8, 16)), {}, "^query has heads=4 and key heads=2; pass enable_gqa=True"),
        (
            (Q, array(2, 3, 8, 16), array(2, 3, 8, 16)),
            {"enable_gqa": True},
            "^query heads=4 is not divisible by key heads=3; grouped-query attention",
        ),
        ((Q, array(3, 4, 8, 16), array(3, 4, 8, 16)), {}, "^query has batch=2 and key batch=3; expected equal, or 1"),
        ((Q, array(2, 4, 0, 16), array(2, 4, 0, 16)), {}, "^key has length 0, .* at least one key"),
        ((Q, Q.astype(jnp.bfloat16), Q), {}, "^key has dtype bfloat16 and query float32; expected one floating dtype"),
        ((Q, Q, Q), {"mask": array(8, 7)}, r"^mask has shape \(8, 7\), which does not broadcast to .* \[2, 4, 8, 8\]"),
        ((Q, Q, Q), {"mask": array(8, 8, dtype=jnp.int32)}, r"^mask has dtype int32; .* mask.astype\(bool\)"),
        ((Q, Q, Q), {"mask": array(8, 8), "is_causal": True}, "^mask and is_causal=True were both given"),
        ((Q, Q, Q), {"window": (-1, 2)}, r"^window=\(-1, 2\) has a negative side"),
        (
            (Q, Q, Q),
            {"kv_lengths": array(3, dtype=jnp.int32)},
            r"^kv_lengths has shape \(3,\) .* integers of shape \(2,\)",
        ),
        (
            (Q, Q, Q),
            {"config": AttentionConfig(implementation="flash")},
            'implementation="flash" is unknown; choose from auto',
        ),
        (
            (Q, Q, Q),
            {"config": AttentionConfig(sequence_parallel="x")},
            'sequence_parallel="x" is unknown; choose from auto',
        ),
        (
            (Q, Q, Q),
            {"config": AttentionConfig(implementation="splash", block_sizes=BlockSizes(100, 256, 128))},
            r"attention_blocks=100,.* is not a possible tile; .* multiples of 128",
        ),
    ],
)
def test_bad_input(args: tuple, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        attention(*args, **{"placement": None, "config": AUTO, **options})


def test_cudnn_error_reaches_the_caller_where_there_is_no_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "is_installed", lambda: False)
    query = array(1, 1, 8, 16, dtype=jnp.bfloat16)
    with pytest.raises(UnsupportedError, match=r"CUDA plugin is not installed here; install jax\[cuda13\]"):
        attention(
            query,
            query,
            query,
            placement=absent_placement("gpu", "h200"),
            config=AttentionConfig(implementation="cudnn"),
        )


def test_tiles_fit_the_lengths() -> None:
    assert block_sizes("v6e", 75_600, 75_600, 128, None) == DEFAULT == BlockSizes(2048, 2048, 1024)
    assert block_sizes("v6e", 75_600, 512, 128, None) == BlockSizes(2048, 512, 256)
    assert block_sizes("v6e", 4099, 4099, 128, None) == BlockSizes(1408, 1536, 768)
    assert block_sizes("unknown chip", 1, 1, 64, None) == BlockSizes(128, 256, 128)
    assert block_sizes("v6e", 300, 300, 128, BlockSizes(128, 128, 128)) == BlockSizes(128, 128, 128)
    for tile in (*tuned_tiles().values(), *map(untuned_tile, (128, 384, 1024))):
        assert tile.key % tile.key_compute == 0
