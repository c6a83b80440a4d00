"""The formula against two countings that know nothing of it."""

import jax
import pytest
import torch

from comfy_tpu.bench.flops import attention_operations, counted_operations, transformer_operations
from comfy_tpu.bench.job import FULL, SMALL, VideoSize
from comfy_tpu.bench.references import empty_module
from comfy_tpu.compiler.component import Component
from comfy_tpu.families.wan import transformer as wan_transformer
from comfy_tpu.parallel.mesh import make_placement

SIZE = VideoSize(96, 64, 9)


def test_wan_14b_is_what_the_literature_says():
    # shared anchors: two forwards at 720p are 13.0 PFLOP, 72 % of it attention; at 480p 3.3 PFLOP, 53 %
    at_720p = transformer_operations(FULL.transformer, 75_600, 512)
    at_480p = transformer_operations(FULL.transformer, 32_760, 512)
    assert 2 * at_720p.total == pytest.approx(13.0e15, rel=0.02)
    assert at_720p.attention / at_720p.total == pytest.approx(0.72, abs=0.01)
    assert 2 * at_480p.total == pytest.approx(3.35e15, rel=0.01)
    assert at_480p.attention / at_480p.total == pytest.approx(0.53, abs=0.01)


def test_transformer_by_hand():
    config = {**SMALL.transformer, "num_layers": 1}
    tokens, text, width, feed = 10, 3, 128, 256
    products = 4 * tokens * width * width + 2 * tokens * width * width  # self q k v o, cross q o
    products += 2 * text * width * width + 2 * tokens * width * feed  # cross k v, feed-forward
    products += tokens * width * 4 * 16 * 2  # patches in and out
    products += text * (64 * width + width * width) + 64 * width + width * width + 6 * width * width
    operations = transformer_operations(config, tokens, text)
    assert operations.linear == 2 * products
    assert operations.attention == 2 * (2 * tokens * tokens * width + 2 * tokens * text * width)


def test_transformer_as_torch_counts_it():
    config = SMALL.transformer

    def call(module):
        latents = torch.empty(1, 16, *SIZE.latent, device="meta")
        text = torch.empty(1, SMALL.text_tokens, config["text_dim"], device="meta")
        return module(latents, torch.empty(1, device="meta"), text, return_dict=False)

    counted = counted_operations(empty_module(wan_transformer.TRANSFORMER, config), call)
    assert counted == transformer_operations(config, SIZE.tokens, SMALL.text_tokens).total


def test_transformer_as_xla_counts_it():
    # Unrolled, because XLA counts the body of a loop once. It also counts norms, RoPE and softmax, which are much at
    # this width.
    config = {**SMALL.transformer, "num_layers": 1}
    component = Component(
        wan_transformer.TRANSFORMER, config, make_placement("single"), dtype=torch.float32, scan=False
    )
    lowered = component.program("forward", static=("return_dict",)).lower(
        component.abstract_weights(),
        hidden_states=torch.empty(1, 16, *SIZE.latent),
        timestep=torch.empty(1),
        encoder_hidden_states=torch.empty(1, SMALL.text_tokens, config["text_dim"]),
        return_dict=False,
    )
    costs = lowered.cost_analysis()
    expected = transformer_operations(config, SIZE.tokens, SMALL.text_tokens).total
    assert expected <= costs["flops"] <= 1.25 * expected


def test_attention():
    heads, tokens, head_dim = 2, 32, 8
    arrays = [jax.ShapeDtypeStruct((heads, tokens, head_dim), "float32")] * 3

    def attention(q, k, v):
        return (q @ k.swapaxes(1, 2)) @ v

    counted = jax.jit(attention).lower(*arrays).cost_analysis()["flops"]
    assert counted == pytest.approx(attention_operations(heads, tokens, head_dim), rel=0.05)
