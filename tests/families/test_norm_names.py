"""The norms of queries and keys in ComfyUI's modules: `scale` in 0.7, `weight` in 0.33, which saves files so."""

import pytest
import torch

from comfy_tpu.families.registry import load_family

NORMS = [
    f"double_blocks.0.{stream}_attn.norm.{norm}_norm.{{}}" for stream in ("img", "txt") for norm in ("query", "key")
]


@pytest.mark.parametrize(
    ("family", "norms"),
    [
        ("HunyuanVideo-1.5", NORMS),
        ("Flux.1 dev", [*NORMS, "single_blocks.0.norm.query_norm.{}", "single_blocks.0.norm.key_norm.{}"]),
    ],
)
def test_both_names_are_read(family, norms):
    convert = load_family(family).single_files["transformer"].convert
    names = [set(convert({norm.format(last): torch.ones(8) for norm in norms}, {})) for last in ("scale", "weight")]
    assert names[0] == names[1]
    assert not {name for name in names[1] if "query_norm" in name or "key_norm" in name}
