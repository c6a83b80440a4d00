"""Both forms of RoPE compute the same."""

import torch

from comfy_tpu.bridge.rotary import _rotate_stacked, _rotate_swapped


def test_swapped_pairs_rotate_as_stacked_ones() -> None:
    generator = torch.Generator().manual_seed(1)
    pairs = torch.randn(2, 5, 3, 8, 2, generator=generator)
    angles = torch.randn(1, 5, 1, 8, generator=generator)
    stacked, swapped = (rotate(pairs, angles.cos(), angles.sin()) for rotate in (_rotate_stacked, _rotate_swapped))
    torch.testing.assert_close(swapped, stacked, rtol=1e-6, atol=1e-7)
    assert not torch.equal(stacked, pairs)
