"""Our attention in the place of ComfyUI's, with everything that a model may say beside it."""

import pytest
import torch

from comfy_tpu.errors import UnsupportedError
from tests.native.architectures import noise

pytestmark = pytest.mark.comfyui


def attend(*args, **kwargs):
    from comfy_tpu.comfy.native.attention import Attention

    return Attention()(None, *args, **kwargs)


def theirs(q, k, v, heads, mask=None, **kwargs):
    from comfy.ldm.modules.attention import attention_pytorch

    return attention_pytorch(q, k, v, heads, mask=mask, **kwargs)


@pytest.mark.parametrize("mask", [None, (5, 7), (2, 5, 7), (2, 4, 5, 7)], ids=str)
def test_as_comfyui(comfyui, mask):
    q, k, v = noise(1, 2, 5, 32), noise(2, 2, 7, 32), noise(3, 2, 7, 32)
    mask = None if mask is None else noise(4, *mask)
    torch.testing.assert_close(attend(q, k, v, 4, mask=mask), theirs(q, k, v, 4, mask=mask))


def test_heads_that_are_split_already(comfyui):
    q, k, v = (noise(seed, 2, 4, length, 8) for seed, length in ((1, 5), (2, 7), (3, 7)))
    for options in ({}, {"skip_output_reshape": True}):
        got = attend(q, k, v, 4, skip_reshape=True, **options)
        torch.testing.assert_close(got, theirs(q, k, v, 4, skip_reshape=True, **options))


def test_a_scale_of_its_own(comfyui):
    q, k, v = (noise(seed, 2, 5, 32) for seed in (1, 2, 3))
    expected = theirs(q * 0.7 * 8**0.5, k, v, 4)
    torch.testing.assert_close(attend(q, k, v, 4, scale=0.7), expected)


@pytest.mark.parametrize("split", [False, True])
def test_fewer_heads_of_keys(comfyui, split):
    q, k, v = noise(1, 2, 4, 5, 8), noise(2, 2, 2, 7, 8), noise(3, 2, 2, 7, 8)
    expected = theirs(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), 4, skip_reshape=True)
    if not split:
        q, k, v = (x.transpose(1, 2).flatten(2) for x in (q, k, v))
    torch.testing.assert_close(attend(q, k, v, 4, skip_reshape=split, enable_gqa=True), expected)


def test_what_it_does_not_know(comfyui):
    with pytest.raises(UnsupportedError, match="the model's attention is given window, which is not known"):
        attend(*(noise(seed, 2, 5, 32) for seed in (1, 2, 3)), 4, window=3, small_input=True)
