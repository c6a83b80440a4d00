"""Every published model: its memory on two slices by the formulas; those of Wan lowered for TPU at their full size, and
what images go through."""

import re

import pytest

from comfy_tpu.config import MeshSizes
from comfy_tpu.families.registry import load_families
from comfy_tpu.parallel.chips import parse_slice
from comfy_tpu.parallel.layouts import rank_layouts
from comfy_tpu.planning.models import find_model
from comfy_tpu.planning.plan import parse_size
from comfy_tpu.planning.program import lower_step
from tests.families import lower_images
from tests.lowering import assert_bounded_work, measure_lowering

DEFAULT = re.compile("Wan2.1-I2V-14B")
FIRST = {family.transformer.build: next(iter(family.card.published)) for family in reversed(load_families())}
PUBLISHED = [
    # By default one of each transformer: the others' sizes are counted by the same formulas.
    pytest.param(name, marks=[] if name in FIRST.values() else [pytest.mark.slow])
    for family in load_families()
    for name in family.card.published
]
WAN = {
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": "1280x720x81",
    "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers": "1280x720x81",
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": "1280x720x81",
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": "1280x720x81",
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": "1280x704x121",
    "Wan-AI/Wan2.1-VACE-14B-diffusers": "1280x720x81",
    "Wan-AI/Wan2.1-VACE-1.3B-diffusers": "848x480x81",
    "linoyts/Wan2.2-VACE-Fun-14B-diffusers": "1280x720x81",
    "Wan-AI/Wan2.2-Animate-14B-Diffusers": "1280x720x200",
}


@pytest.mark.default_cases(
    "Wan-AI/Wan2.1-T2V-14B-Diffusers-v6e-8",
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers-v6e-8",
    "Wan-AI/Wan2.1-VACE-14B-diffusers-v6e-8",
    "black-forest-labs/FLUX.1-dev-v6e-8",
    "black-forest-labs/FLUX.2-dev-v6e-8",
    "Lightricks/LTX-Video-v6e-8",
    "Tongyi-MAI/Z-Image-Turbo-v6e-8",
    "Qwen/Qwen-Image-v6e-8",
)
@pytest.mark.parametrize("tpu", ["v6e-8", pytest.param("v5p-8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PUBLISHED)
def test_it_fits_on_eight(name: str, tpu: str) -> None:
    model = find_model(name)
    best = rank_layouts(model.workload(model.defaults), parse_slice(tpu))[0]
    assert best.fits
    assert best.memory.weights > 1e8


def test_a_pair_is_counted_twice() -> None:
    one, pair = (find_model(name) for name in ("Wan2.1-T2V-14B-Diffusers", "Wan2.2-T2V-A14B-Diffusers"))
    weights = [
        rank_layouts(model.workload(one.defaults), parse_slice("v6e-8"))[0].memory.weights for model in (one, pair)
    ]
    assert weights[1] == 2 * weights[0]


@pytest.mark.parametrize(
    ("name", "tpu"),
    [
        (name, tpu) if tpu == "v6e-8" and DEFAULT.search(name) else pytest.param(name, tpu, marks=pytest.mark.slow)
        for name in WAN
        for tpu in ("v6e-8", "v5p-8")
    ],
)
def test_wan_lowers_for_tpu_at_its_full_size(name: str, tpu: str) -> None:
    model, slice_ = find_model(name), parse_slice(tpu)
    settings = parse_size(WAN[name], model)
    work = model.workload(settings)
    sizes = MeshSizes(dp=2, sp=slice_.chips // 2)  # v5p-8 has four chips
    facts = lower_step(model, settings, work, slice_, sizes).facts
    assert facts.square_arrays == ()
    cross = 3 if model.config.get("image_dim") else 2  # the video's own, the prompt's, and an image's
    rotations = 2  # of queries and of keys
    # Of blocks, which may call the same kernels: those of a control, or before and after a face is read.
    kinds = 2 if model.config.get("vace_layers") or model.config.get("motion_encoder_size") else 1
    assert 1 + rotations <= facts.kernels <= kinds * (cross + rotations)


@pytest.mark.thorough  # by default: what Wan's does, below
@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        pytest.param(
            "wan",
            {
                "embed_image": [1, 257, 1280],
                "encode_frames 0": [1, 16, 1, 90, 160],
                "encode_frames 1": [1, 16, 1, 90, 160],
            },
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "5b",
            {
                "encode_frames 0": [1, 48, 1, 44, 80],
                "decode_frame 0": [1, 1, 704, 1280, 3],
                "decode_frame 1": [1, 4, 704, 1280, 3],
            },
            marks=pytest.mark.slow,
        ),
        ("hunyuan", {"embed_image": [1, 729, 1152], "encode_frames 0": [1, 32, 1, 45, 80]}),
    ],
)
def test_what_a_picture_goes_through_lowers_for_eight_chips(name: str, wanted: dict[str, list[int]]) -> None:
    seen = measure_lowering(lower_images.lower_programs, name)
    assert_bounded_work(seen, operators=3_000)
    programs = seen["programs"]
    assert {program: programs[program]["outputs"][0] for program in wanted} == wanted
    for program in programs.values():
        assert program["platforms"] == ["tpu"]
        assert program["devices"] == 8
        assert program["megabytes"] < 5, "nothing of the size of an image was worked out on the host"
        assert program["sequences in one array"] <= 1
    if "embed_image" in programs:
        assert programs["embed_image"]["loops"] == 1, "its layers are one scanned layer"
