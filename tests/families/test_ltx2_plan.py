"""LTX-2 at its full size: every program lowered for TPU, and what a slice of them would do."""

import pytest
import torch

from comfy_tpu.compiler.component import Component
from comfy_tpu.config import MeshSizes
from comfy_tpu.families.ltx2 import model as ltx2_model
from comfy_tpu.families.ltx2 import transformer as ltx2_transformer
from comfy_tpu.parallel.chips import parse_slice
from comfy_tpu.parallel.layouts import _weight_bytes
from comfy_tpu.parallel.mesh import abstract_placement
from comfy_tpu.planning.models import find_model
from comfy_tpu.planning.plan import parse_size
from comfy_tpu.planning.program import lower_step
from tests.counted_work import published_work
from tests.families import lower_ltx2
from tests.lowering import assert_bounded_work, measure_lowering


@pytest.mark.thorough  # by default: tests/planning/test_counted_work.py
def test_the_published_size() -> None:
    model = find_model("LTX-2")
    work = model.workload(model.defaults)
    assert (work.tokens, work.text_tokens, work.layers, work.hidden, work.ffn) == (6144, 1024, 48, 4096, 16384)
    assert work.batch == 4, "the prompt, the negative prompt, without a block's self-attention, and without each other"


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [MeshSizes(sp=4, tp=2), MeshSizes(sp=8), MeshSizes(tp=8)], ids=str)
def test_the_workload_counts_the_weights_of_the_published_model(sizes: MeshSizes) -> None:
    config = ltx2_model.LTX2.card.published["Lightricks/LTX-2"]
    placement = abstract_placement(sizes, platform="tpu", chip="v6e")
    component = Component(ltx2_transformer.TRANSFORMER, config, placement, dtype=torch.bfloat16)
    # Biases are counted whole, also those that follow their columns over tp.
    counted = _weight_bytes(published_work("LTX-2"), sizes)
    assert counted == pytest.approx(sum(slot.bytes_per_device for slot in component.slots), rel=3e-3)


LOWERED = {
    # A block of two streams has six attentions and two feed-forwards: 12,500 operations.
    "LTX-2": (8_200, 15_000, [3840, 3840], 120240),
    # The vocoder has two generators, whose activations are resampled up and down: 21,100 operations.
    "LTX-2.3": (17_700, 26_500, [2048, 4096], 240480),
}
"""Operators and operations; features of both texts; samples of a waveform."""


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "sizes"), [("v6e", MeshSizes(sp=4, tp=2)), ("v5p", MeshSizes(sp=2, tp=2))])
@pytest.mark.parametrize("name", LOWERED)
def test_full_size_lowers(name: str, chip: str, sizes: MeshSizes) -> None:
    operators, operations, features, samples = LOWERED[name]
    seen = measure_lowering(lower_ltx2.lower_programs, name, 768, 512, 121, chip, sizes)
    assert_bounded_work(seen, operators=operators, operations=operations)
    programs = seen["programs"]
    for program in programs.values():
        assert program["platforms"] == ["tpu"]
        assert program["devices"] == sizes.sp * sizes.tp
        assert program["megabytes"] < 1, "nothing of the size of a sequence was worked out on the host"
    for name in ("denoise_step", "denoise_step from an image"):
        assert programs[name]["loops"] == 1, "48 blocks are one scanned block"
        assert programs[name]["outputs"] == [[1, 128, 17, 16, 24]] * 6, "the last frame holds the sound"
    assert programs["encode_text"]["outputs"] == [[49, 2, 1024, 3840]]
    assert programs["connect"]["outputs"] == [[2, 1024, width] for width in features]
    assert programs["decode_frame"]["outputs"] == [[1, 121, 512, 768, 3]]
    assert programs["encode_frames"]["outputs"] == [[1, 128, 1, 16, 24]]
    assert programs["decode sound"]["outputs"] == [[1, 2, 501, 64]]
    assert programs["synthesize"]["outputs"] == [[1, 2, samples]]


@pytest.mark.slow
@pytest.mark.parametrize("tpu", ["v6e-8", "v5p-8"])
@pytest.mark.parametrize("name", ["LTX-2", "LTX-2.3-Diffusers"])
def test_a_step_lowers_for_tpu(name: str, tpu: str) -> None:
    model, slice_ = find_model(name), parse_slice(tpu)
    settings = parse_size("704P", model)
    sizes = MeshSizes(sp=4, tp=2) if tpu == "v6e-8" else MeshSizes(sp=2, tp=2)
    facts = lower_step(model, settings, model.workload(settings), slice_, sizes).facts
    assert facts.square_arrays == ()
