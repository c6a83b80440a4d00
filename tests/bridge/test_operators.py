"""Every operator of the table against PyTorch on the CPU: default arguments, ragged sizes, low precision."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from comfy_tpu.bridge import TraceContext, operator
from comfy_tpu.bridge.environment import environment
from comfy_tpu.bridge.operators import OPERATORS
from comfy_tpu.errors import InvalidValueError, UnsupportedError
from comfy_tpu.parallel.mesh import make_placement
from tests.tracing import relative_error, run_traced

aten = torch.ops.aten


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, generator=generator).to(dtype)


x3 = normal(2, 7, 13)
image = normal(2, 6, 9, 11)
video = normal(1, 4, 5, 7, 6)

Case = tuple[Callable[..., Any], list[Callable[..., Any]], tuple[torch.Tensor, ...]]
CASES: dict[str, Case] = {
    # name: (operators under test, in a call with default arguments; the call; its tensors)
    "normalize": ([F.normalize], lambda x: F.normalize(x), (x3,)),
    "normalize last of zeros": ([F.normalize], lambda x: F.normalize(0 * x, dim=-1), (x3,)),
    "normalize by sums": ([F.normalize], lambda x: F.normalize(x, 1.0, 0, 0.5), (x3,)),
    "linear": ([F.linear], lambda x, w: F.linear(x, w), (x3, normal(5, 13))),
    "linear bias": ([F.linear], lambda x, w, b: F.linear(x, w, b), (x3, normal(5, 13), normal(5))),
    "linear of a row": ([F.linear], lambda x, w: F.linear(x, w), (normal(13), normal(5, 13))),
    "linear to one number": ([F.linear], lambda x, w: F.linear(x, w), (x3, normal(13))),
    "linear bf16": ([F.linear], lambda x, w: F.linear(x, w), (x3.bfloat16(), normal(5, 13).bfloat16())),
    "einsum": ([torch.einsum], lambda x, w: torch.einsum("...n,d->...nd", x, w), (x3, normal(5))),
    "einsum of a list": (
        [torch.einsum],
        lambda x, y, z: torch.einsum("bij, bkj, k -> i", [x, y, z]),
        (x3, normal(2, 3, 13), normal(3)),
    ),
    "einsum without letters": ([torch.einsum], lambda x: torch.einsum(x, [0, 1, 2], [1]), (x3,)),
    "einsum bf16": (
        [torch.einsum],
        lambda x, w: torch.einsum("bij,kj", x, w),
        (x3.bfloat16(), normal(5, 13).bfloat16()),
    ),
    "rms_norm": ([F.rms_norm], lambda x, w: F.rms_norm(x, (13,), w), (x3, normal(13))),
    "rms_norm no weight": ([F.rms_norm], lambda x: F.rms_norm(x, (7, 13)), (x3,)),
    "torch.rms_norm eps": ([torch.rms_norm], lambda x: torch.rms_norm(x, (13,), eps=0.1), (x3,)),
    "rms_norm bf16": ([F.rms_norm], lambda x: F.rms_norm(x, (13,)), (x3.bfloat16() * 1e-2,)),
    "layer_norm": ([F.layer_norm], lambda x: F.layer_norm(x, (13,)), (x3 + 5,)),
    "layer_norm affine": (
        [F.layer_norm],
        lambda x, w, b: F.layer_norm(x, (7, 13), w, b),
        (x3, normal(7, 13), normal(7, 13)),
    ),
    "torch.layer_norm": ([torch.layer_norm], lambda x, w: torch.layer_norm(x, (13,), w), (x3, normal(13))),
    "native_layer_norm": (
        [aten.native_layer_norm.default],
        lambda x, w, b: aten.native_layer_norm(x, (13,), w, b, 1e-5),
        (x3, normal(13), normal(13)),
    ),
    "layer_norm bf16": ([F.layer_norm], lambda x: F.layer_norm(x, (13,)), (x3.bfloat16(),)),
    "group_norm": ([F.group_norm], lambda x: F.group_norm(x, 3), (image,)),
    "group_norm affine": ([F.group_norm], lambda x, w, b: F.group_norm(x, 2, w, b), (video, normal(4), normal(4))),
    "group_norm rank 2": ([F.group_norm], lambda x: F.group_norm(x, 3), (normal(5, 6),)),
    "torch.group_norm": ([torch.group_norm], lambda x: torch.group_norm(x, 6, eps=0.3), (image,)),
    "native_group_norm": (
        [aten.native_group_norm.default],
        lambda x, w: aten.native_group_norm(x, w, None, 2, 6, 99, 3, 1e-5),
        (image, normal(6)),
    ),
    "dropout": ([F.dropout], lambda x: F.dropout(x, training=False), (x3,)),
    "torch.dropout": ([torch.dropout], lambda x: torch.dropout(x, 0.3, False), (x3,)),
    "native_dropout": ([aten.native_dropout.default], lambda x: aten.native_dropout(x, 0.3, False), (x3,)),
    "unflatten": ([torch.unflatten], lambda x: torch.unflatten(x, 1, (7, 1)), (x3,)),
    "Tensor.unflatten -1": ([torch.Tensor.unflatten], lambda x: x.unflatten(-1, (-1, 13)), (x3,)),
    "chunk": ([torch.chunk], lambda x: torch.chunk(x, 2), (x3,)),
    "Tensor.chunk ragged": ([torch.Tensor.chunk], lambda x: x.chunk(3, dim=-1), (x3,)),
    "chunk fewer than asked": ([torch.chunk], lambda x: torch.chunk(x, 5, 1), (x3,)),
    "cartesian_prod": ([torch.cartesian_prod], lambda a, b: torch.cartesian_prod(a, b), (normal(3), normal(5))),
    "cartesian_prod three": (
        [torch.cartesian_prod],
        lambda a, b: torch.cartesian_prod(a, b, a),
        (normal(2), normal(3)),
    ),
    "cartesian_prod one": ([torch.cartesian_prod], lambda a: torch.cartesian_prod(a), (normal(3),)),
    "conv1d": ([F.conv1d], lambda x, w: F.conv1d(x, w), (x3, normal(5, 7, 3))),
    "conv2d": ([F.conv2d], lambda x, w: F.conv2d(x, w), (image, normal(4, 6, 3, 2))),
    "conv2d all": (
        [F.conv2d],
        lambda x, w, b: F.conv2d(x, w, b, stride=(2, 1), padding=(1, 2), dilation=2, groups=3),
        (image, normal(9, 2, 3, 3), normal(9)),
    ),
    "conv2d same": (
        [F.conv2d],
        lambda x, w: F.conv2d(x, w, padding="same", dilation=(1, 3)),
        (image, normal(2, 6, 5, 3)),
    ),
    "conv2d valid": ([F.conv2d], lambda x, w: F.conv2d(x, w, padding="valid"), (image, normal(2, 6, 4, 3))),
    "conv2d unbatched": ([F.conv2d], lambda x, w: F.conv2d(x, w, padding=1), (image[0], normal(2, 6, 3, 3))),
    "conv3d": ([F.conv3d], lambda x, w: F.conv3d(x, w), (video, normal(3, 4, 3, 3, 3))),
    "conv3d bf16": (
        [F.conv3d],
        lambda x, w, b: F.conv3d(x, w, b, 1, 1),
        (video.bfloat16(), normal(3, 4, 3, 3, 3, dtype=torch.bfloat16), normal(3, dtype=torch.bfloat16)),
    ),
    "interpolate": ([F.interpolate], lambda x: F.interpolate(x, scale_factor=2.0), (image,)),
    "interpolate ragged": ([F.interpolate], lambda x: F.interpolate(x, scale_factor=1.7), (image,)),
    "interpolate size": ([F.interpolate], lambda x: F.interpolate(x, size=(5, 23)), (image,)),
    "interpolate exact": ([F.interpolate], lambda x: F.interpolate(x, (13, 7), mode="nearest-exact"), (image,)),
    "interpolate video": (
        [F.interpolate],
        lambda x: F.interpolate(x, scale_factor=(1.0, 2.0, 3.0), mode="nearest-exact"),
        (video,),
    ),
    "interpolate recomputed": (
        [F.interpolate],
        lambda x: F.interpolate(x, scale_factor=1.7, recompute_scale_factor=True),
        (image,),
    ),
    "interpolate bilinear": ([F.interpolate], lambda x: F.interpolate(x, size=(5, 23), mode="bilinear"), (image,)),
    "attention": (
        [F.scaled_dot_product_attention],
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        (normal(2, 3, 7, 8), normal(2, 3, 11, 8), normal(2, 3, 11, 5)),
    ),
    "attention all": (
        [F.scaled_dot_product_attention],
        lambda q, k, m: F.scaled_dot_product_attention(q, k, k, attn_mask=m, scale=0.3, enable_gqa=True),
        (normal(2, 6, 7, 8), normal(2, 2, 11, 8), normal(1, 1, 7, 11) > -1),
    ),
    "attention causal": (
        [F.scaled_dot_product_attention],
        lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True),
        (normal(2, 3, 7, 8), normal(2, 3, 11, 8)),
    ),
    "attention unbatched": (
        [F.scaled_dot_product_attention],
        lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m),
        (normal(3, 7, 8), normal(3, 7, 7)),
    ),
    "attention one head": (
        [F.scaled_dot_product_attention],
        lambda q: F.scaled_dot_product_attention(q, q, q),
        (normal(7, 8),),
    ),
    "attention five dimensions": (
        [F.scaled_dot_product_attention],
        lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m),
        (normal(2, 3, 2, 7, 8), normal(1, 3, 1, 7, 7)),
    ),
    "aten attention": (
        [aten.scaled_dot_product_attention.default],
        lambda q: aten.scaled_dot_product_attention(q, q, q),
        (normal(1, 2, 7, 8),),
    ),
}


NARROW = (normal(3, 5, dtype=torch.bfloat16), torch.tensor(0.3))


@pytest.mark.parametrize(
    "call",
    [
        lambda x, s: x + s,
        lambda x, s: s * x,
        lambda x, s: x / s,
        lambda x, s: x.abs() ** s,
        lambda x, s: torch.where(x > 0, x, s),
        lambda x, s: x.clamp(max=s),
        lambda x, s: x * torch.tensor(0.3),
        lambda x, s: torch.where(x > 0, s, s),
        lambda x, s: x.float() * s.bfloat16(),
        lambda x, s: (x > 0) * s,
    ],
    ids=["add", "mul", "div", "pow", "where", "clamp", "constant", "no values", "the other way", "another kind"],
)
def test_a_tensor_without_dimensions_does_not_widen_the_result(call: Any) -> None:
    expected, actual = call(*NARROW), run_traced(call, *NARROW)
    assert actual.dtype == expected.dtype
    assert relative_error(actual, expected) <= 8e-3


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_torch(name: str) -> None:
    _, call, tensors = CASES[name]
    expected, actual = call(*tensors), run_traced(call, *tensors)
    expected = expected if isinstance(expected, (tuple, list)) else (expected,)
    actual = actual if isinstance(actual, (tuple, list)) else (actual,)
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        tolerance = 1e-5 if other.dtype == torch.float32 else 8e-3
        assert relative_error(one, other) <= tolerance


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w, b: F.conv3d(x, w, b),
        lambda x, w, b: F.conv3d(x, w, b, padding=1),
        lambda x, w, b: F.conv3d(x, w, b, stride=(1, 2, 1), padding=(2, 0, 1), dilation=(1, 2, 1)),
        lambda x, w, b: F.conv3d(x, w[..., :1], b, padding="same"),
        lambda x, w, b: F.conv3d(x, w[:, :, :1], b),
        lambda x, w, b: F.conv3d(x, w, b, stride=2),
        lambda x, w, b: F.conv3d(x, w, b, padding=2, dilation=(2, 1, 1), stride=(2, 1, 1)),
        lambda x, w, b: F.conv3d(x, w[:, :2], None, groups=2),
    ],
)
def test_conv3d_by_taps_on_a_cpu(call: Callable[..., Any]) -> None:
    tensors = (video, normal(6, 4, 3, 3, 2), normal(6))
    actual = run_traced(call, *tensors, context=TraceContext(placement=make_placement("single", platform="cpu")))
    assert relative_error(actual, call(*tensors)) <= 1e-5


def test_every_operator_of_the_table_has_a_case() -> None:
    environment()
    covered = {target for targets, _, _ in CASES.values() for target in targets}
    assert set(OPERATORS) - covered == set()


@pytest.mark.parametrize(
    ("call", "tensors", "error", "text"),
    [
        (lambda x: F.dropout(x), (x3,), UnsupportedError, r"dropout\(p=0.5\) is training.*model.eval\(\)"),
        (lambda x: aten.native_dropout(x, 0.5, True), (x3,), UnsupportedError, "identity: call model.eval"),
        (
            lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.1),
            (normal(1, 1, 3, 4),),
            UnsupportedError,
            "dropout_p=0.1",
        ),
        (lambda x: F.group_norm(x, 4), (image,), ValueError, "channels=6 is not divisible by num_groups=4"),
        (
            lambda x: F.rms_norm(x, (12,)),
            (x3,),
            ValueError,
            r"normalized_shape=\(12,\) must be the end of .*\(2, 7, 13\)",
        ),
        (
            lambda x: x.unflatten(1, (2, 3)),
            (x3,),
            ValueError,
            r"sizes \(2, 3\) do not multiply up to dimension 1 of size 7",
        ),
        (lambda x: x.chunk(0), (x3,), RuntimeError, "greater than 0, got: 0"),
        (lambda x, w: F.conv2d(x, w, stride=2, padding="same"), (image, normal(2, 6, 3, 3)), RuntimeError, "strided"),
        (
            lambda x, w: F.conv2d(x, w, padding="full"),
            (image, normal(2, 6, 3, 3)),
            RuntimeError,
            "'full', expected one of",
        ),
        (lambda x: F.interpolate(x), (image,), ValueError, "size or scale_factor"),
    ],
)
def test_refuses_what_it_does_not_support(
    call: Callable[..., Any], tensors: tuple[torch.Tensor, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        run_traced(call, *tensors)


def test_a_write_into_a_chunk_reaches_the_whole() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        first, _ = x.chunk(2, dim=-1)
        first.mul_(0)
        return x

    assert torch.equal(run_traced(call, x3), call(x3))


def test_a_second_implementation_is_refused_with_the_name_of_the_first() -> None:
    environment()
    with pytest.raises(InvalidValueError, match=r"implemented by comfy_tpu.bridge.operators.normalization.rms_norm"):

        @operator(F.rms_norm)
        def another(*args: Any) -> None: ...


def test_einsum_leaves_nothing_behind() -> None:
    """`jnp.einsum` makes a jit function at each call, and JAX keeps 2,048 of them: 19 objects each."""

    def trace() -> int:
        run_traced(lambda x, y: torch.einsum("bij,bkj->bik", x, y), x3, x3)
        gc.collect()
        return len(gc.get_objects())

    trace()
    before = trace()
    assert trace() - before < 8
