"""The cost of a step, counted from the traced program, against lists of every family's matrices that were made by hand.

hand_counted.json is what those lists gave for the published models at their default settings, before they were removed:
the best layouts on v6e-8, with bytes and operations of one device.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from comfy_tpu.parallel.chips import parse_slice
from comfy_tpu.parallel.layouts import rank_layouts
from comfy_tpu.planning.models import find_model

HAND_COUNTED: dict[str, Any] = json.loads((Path(__file__).parent / "hand_counted.json").read_text())
V6E_8 = parse_slice("v6e-8")
SEQUENTIAL = dataclasses.replace(V6E_8.chip, overlaps_gathers=False)
"""The lists are from before weights were gathered beside products, which takes more memory."""
DEFAULT = {
    # One of each family; of Wan: with an image's tokens, two transformers, and a timestep of its own for every token.
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers",
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
    "black-forest-labs/FLUX.1-dev",
    "black-forest-labs/FLUX.2-dev",
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_i2v",
    "Lightricks/LTX-Video",
}


@pytest.mark.default_cases(
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers", "black-forest-labs/FLUX.2-dev", "Lightricks/LTX-Video"
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.slow) for name in HAND_COUNTED]
)
def test_counted_work_is_the_hand_counted_one(name: str) -> None:
    model, expected = find_model(name), HAND_COUNTED[name]
    work = model.workload(model.defaults)
    for field in ("batch", "tokens", "text_tokens", "heads", "head_dim", "latent_bytes", "models"):
        assert getattr(work, field) == expected[field], field
    ranking = rank_layouts(work, dataclasses.replace(V6E_8, chip=SEQUENTIAL))
    assert str(ranking[0].sizes) == next(iter(expected["layouts"])), "the layout that is chosen"
    estimates = {str(estimate.sizes): estimate for estimate in ranking}
    for sizes, figures in expected["layouts"].items():
        estimate = estimates[sizes]
        assert estimate.memory.total == pytest.approx(figures["memory"], rel=0.01)
        assert estimate.flops == pytest.approx(figures["flops"], rel=0.01)
        assert estimate.sent_bytes == pytest.approx(figures["sent"], rel=0.01)
