"""Torch maths whose result is known, and the states of the random number generators."""

import functools
import hashlib
import random

import numpy
import torch
import torch.nn.functional as F


@functools.cache
def inputs():
    numbers = torch.arange(1, 3 * 4 * 8 * 8 + 1, dtype=torch.float32).reshape(3, 4, 8, 8)
    return torch.sin(numbers), torch.cos(torch.arange(4 * 4 * 9, dtype=torch.float32).reshape(4, 4, 3, 3))


def chain():
    """Functions that a bridge to another library is likely to have touched."""
    image, kernel = inputs()
    x = F.conv2d(image, kernel, padding=1)
    x = F.group_norm(F.silu(x), 2)
    x = F.layer_norm(x, x.shape[-1:])
    x = F.scaled_dot_product_attention(x, x, x)
    x = torch.cat(x.chunk(2, dim=-1), dim=-1).unflatten(-1, (2, 4)).flatten(-2)
    x = F.dropout(F.gelu(x, approximate="tanh"), p=0.0)
    x = torch.einsum("bchw,bcwk->bchk", x, x) + torch.tensor([0.5]) * torch.ones(8).to("cpu", torch.float64).float()
    return x.softmax(-1)


@functools.cache
def expected():
    return chain()


def compute():
    """Problems: what differs from the result before anything else ran."""
    result, problems = chain(), []
    if type(result) is not torch.Tensor or result.device.type != "cpu" or result.dtype != torch.float32:
        problems.append(f"torch gave a {type(result).__name__} of {result.dtype} on {result.device}")
    elif not torch.allclose(result, expected(), atol=1e-6, rtol=0):
        problems.append(f"torch computes otherwise: off by {float((result - expected()).abs().max())}")
    return problems


def random_states():
    def digest(content):
        return hashlib.sha256(content).hexdigest()

    return {
        "torch": digest(torch.get_rng_state().numpy().tobytes()),
        "python": digest(repr(random.getstate()).encode()),
        "numpy": digest(numpy.random.get_state()[1].tobytes()),
    }
