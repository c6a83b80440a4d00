"""Stacks and sharding rules that `port new` proposes from a module's structure and one run of it."""

import fnmatch
from typing import Any

import pytest
import torch
from torch import nn

from comfy_tpu.compiler.stacking import LayerStack
from comfy_tpu.parallel.rules import Rule, covers
from comfy_tpu.porting.scaffold.pipelines import find_source
from comfy_tpu.porting.scaffold.proposal import Proposal, merge_patterns, propose_sharding

WIDTH, HEADS, TEXT, VIDEO = 256, 4, 5, 12


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm_q = nn.RMSNorm(WIDTH)
        self.to_out = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.to_out[0](self.norm_q(self.to_q(x)) + self.to_k(x) + self.to_v(x))
        return out


class Block(nn.Module):
    """Its outputs are in another order than its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.Module()
        self.norm1.linear = nn.Linear(WIDTH, 2 * WIDTH)
        self.attn = Attention()
        self.lonely = nn.Module()
        self.lonely.to_q = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: Any, encoder_hidden_states: Any, temb: Any) -> tuple[Any, Any]:
        scale = self.norm1.linear(temb).chunk(2, dim=-1)[0].unsqueeze(1)
        both = self.attn(torch.cat((encoder_hidden_states, hidden_states), dim=1)) * scale
        return both[:, :TEXT] + self.lonely.to_q(encoder_hidden_states), both[:, TEXT:]


class Model(nn.Module):
    def __init__(self, num_layers: int = 4, num_attention_heads: int = HEADS, attention_head_dim: int = 64) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_layers))
        self.others = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor, text: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            text, x = block(x, text, temb)
        return self.others[1](self.others[0](x) * 2)


@pytest.fixture(scope="module")
def proposal() -> Proposal:
    source = find_source("PixArtSigmaPipeline")
    source = type(source)(source.pipeline, {**source.parts, "transformer": Model}, {})
    model = Model(num_layers=2)
    x, text, temb = torch.randn(1, VIDEO, WIDTH), torch.randn(1, TEXT, WIDTH), torch.randn(1, WIDTH)
    return propose_sharding(source, model, {"x": x, "text": text, "temb": temb})


def test_blocks_are_stacked_with_what_they_carry_in_its_order(proposal: Proposal) -> None:
    assert proposal.stacks == (LayerStack("blocks", carry=("encoder_hidden_states", "hidden_states")),)
    assert proposal.unstacked == ("others: what a block answers is not what the next one is given",)
    assert proposal.heads == "num_attention_heads"


def kind(proposal: Proposal, name: str) -> str:
    (rule,) = [rule for rule in proposal.rules if fnmatch.fnmatchcase(name, rule.pattern)]
    return rule.kind


def test_every_weight_has_one_rule_and_the_pairs_are_column_and_row(proposal: Proposal) -> None:
    weights = {name: weight for name, weight in Model(num_layers=4).named_parameters()}  # noqa: C416 by type
    assert covers(proposal.rules, weights, HEADS)
    expected = {
        "blocks.*.attn.to_q.weight": "column",
        "blocks.*.attn.to_v.bias": "column",
        "blocks.*.attn.norm_q.weight": "column",
        "blocks.*.attn.to_out.0.weight": "row",
        "blocks.*.attn.to_out.0.bias": "replicate",
        "blocks.*.norm1.linear.weight": "column",
        "blocks.*.lonely.to_q.weight": "column",
        "embed.weight": "gather",
        "embed.bias": "replicate",
        "others.0.weight": "gather",
    }
    assert {name: kind(proposal, name) for name in expected} == expected


def test_bytes_are_those_of_the_full_size(proposal: Proposal) -> None:
    """Four layers where two were run, two bytes a weight."""
    assert sum(proposal.nbytes.values()) == 2 * sum(weight.numel() for weight in Model(num_layers=4).parameters())
    (q,) = [rule.pattern for rule in proposal.rules if fnmatch.fnmatchcase("blocks.*.attn.to_q.weight", rule.pattern)]
    assert proposal.nbytes[q] == 4 * 3 * (WIDTH * WIDTH + WIDTH) * 2


def test_patterns_are_merged_only_where_they_mean_the_same() -> None:
    kinds: Any = {
        "blocks.*.to_q.weight": "column",
        "blocks.*.to_k.weight": "column",
        "blocks.*.to_v.weight": "gather",
        "out.weight": "gather",
        "out.bias": "replicate",
        "norm.weight": "replicate",
        "norm.bias": "replicate",
    }
    rules = merge_patterns(kinds)
    assert Rule("replicate", "norm.*") in rules
    assert Rule("gather", "out.weight") in rules
    for name, wanted in kinds.items():
        assert [rule.kind for rule in rules if fnmatch.fnmatchcase(name, rule.pattern)] == [wanted]
