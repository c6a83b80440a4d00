"""Latents as the tokens of a transformer."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from comfy_tpu.bridge.constraints import constrain


class PatchEmbedding(torch.nn.Conv3d):
    """A convolution whose patches do not overlap, as a matrix product over patches that are split over sp first.

    XLA splits no convolution by the tokens that come out of it: every chip would compute all of them (at sp=8, 75,600
    tokens in 3.5 GB of temporaries), and then drop what is not its share.
    """

    @classmethod
    def like(cls, convolution: torch.nn.Conv3d) -> PatchEmbedding:
        frames, rows, columns = convolution.kernel_size
        sides = (frames, rows, columns)
        return cls(convolution.in_channels, convolution.out_channels, kernel_size=sides, stride=sides)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """[batch, channels, frames, height, width] -> [batch, features, tokens, 1, 1]: whoever flattens the last three
        dimensions has the tokens of the original."""
        batch, channels, *sizes = latents.shape
        sides = self.kernel_size
        grid = [size // side for size, side in zip(sizes, sides, strict=True)]
        patches = latents.reshape(batch, channels, grid[0], sides[0], grid[1], sides[1], grid[2], sides[2])
        tokens = patches.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(batch, math.prod(grid), -1)
        embedded = F.linear(constrain(tokens, "dp", "sp", None), self.weight.flatten(1), self.bias)
        return embedded.transpose(1, 2)[..., None, None]


def as_tokens(latents: torch.Tensor) -> torch.Tensor:
    """[batch, channels, 1, height, width] -> a token for each 2 × 2 latents, channel by channel."""
    patches = latents.squeeze(2).unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def as_latents(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The inverse of `as_tokens`; height and width in latents."""
    patches = tokens.unflatten(2, (-1, 2, 2)).unflatten(1, (height // 2, width // 2))
    return patches.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3).unsqueeze(2)
