"""What must hold for the model that the project is about, counted in its program; the formulas say the same."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from comfy_tpu.config import MeshSizes
from comfy_tpu.errors import CheckpointError, InvalidValueError, MeshError
from comfy_tpu.parallel.chips import parse_slice
from comfy_tpu.parallel.layouts import estimate
from comfy_tpu.pipeline.model_files import DEMO_DIRECTORY, ModelFiles
from comfy_tpu.planning import plan as planning
from comfy_tpu.planning.compilation import count_program
from comfy_tpu.planning.models import find_model
from comfy_tpu.planning.plan import make_plan, parse_size
from comfy_tpu.planning.program import lower_step, square_arrays
from tests.planning.tpu_compiler import needs_tpu_compiler

WAN_14B = "Wan-AI/Wan2.1-T2V-14B-Diffusers"
V6E_8 = parse_slice("v6e-8")


@pytest.fixture(scope="module")
def wan_plan():
    """The best layout counted, and the seed's; the others in between take as long each."""
    model = find_model(WAN_14B)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "COUNTED_LAYOUTS", 1)
        plan, _ = make_plan(model, parse_size("1280x720x81", model), V6E_8, compile_=False)
    return plan


@pytest.mark.slow  # by default: test_formulas_for_other_slices, of one layout
def test_the_chosen_layout_fits_with_a_tenth_to_spare(wan_plan):
    assert wan_plan.fits
    assert wan_plan.chosen.peak_bytes <= 0.9 * 32e9
    assert wan_plan.chosen.sizes == wan_plan.layouts[0].sizes == MeshSizes(dp=2, sp=4)


@pytest.mark.slow  # by default: test_formulas_for_other_slices, of one layout
def test_it_sends_at_most_two_fifths_of_the_seeds_layout(wan_plan):
    assert wan_plan.seed.sizes == MeshSizes(dp=2, tp=4)
    assert wan_plan.seed.partitioned.sent_bytes > 139e9
    assert wan_plan.seed_share <= 0.4
    assert wan_plan.seed_share == pytest.approx(
        wan_plan.chosen.partitioned.sent_bytes / wan_plan.seed.partitioned.sent_bytes
    )


def counted(plan):
    layouts = [layout for layout in plan.layouts if layout.partitioned]
    assert len(layouts) == 2, "the best, and the seed's"
    return layouts


@pytest.mark.slow  # by default: test_formulas_for_other_slices, of one layout
def test_every_collective_has_a_cause(wan_plan):
    for layout in counted(wan_plan):
        assert layout.partitioned.traffic
        assert layout.partitioned.unexplained == ()


@pytest.mark.slow  # by default: test_formulas_for_other_slices, of one layout
def test_splash_is_inside_and_no_scores_of_tokens_by_tokens(wan_plan):
    for layout in counted(wan_plan):
        assert layout.facts.kernels == layout.partitioned.kernels == 4, "queries, keys, self-, cross-attention"
        assert layout.facts.square_arrays == layout.partitioned.square_arrays == ()


@pytest.mark.slow  # by default: test_formulas_for_other_slices, of one layout
def test_formulas_say_what_the_program_does(wan_plan):
    for layout in counted(wan_plan):
        check_formulas(layout.estimate, layout.facts, layout.partitioned)


def check_formulas(guess, facts, program):
    # The ways of the guidance branches are the compiler's choice; they are 0.1 % of the whole.
    assert guess.sent_bytes == pytest.approx(program.sent_bytes, rel=0.001)
    for cause in {item.cause for item in program.traffic} - {"guidance branches"}:
        told = sum(item.nbytes for item in guess.traffic if item.cause == cause)
        assert told == pytest.approx(sum(x.nbytes for x in program.traffic if x.cause == cause), rel=1e-6), cause
    # Together, because short cross-attention is products, not a kernel.
    assert guess.flops == pytest.approx(program.product_flops + program.kernel_flops, rel=0.002)
    memory = guess.memory
    # Biases and norms are taken for whole everywhere, also where tp splits them.
    assert memory.weights + memory.prompt + memory.latents == pytest.approx(facts.resident_bytes, abs=10e6)


@pytest.mark.thorough  # by default: what the compiler counts, below
@pytest.mark.parametrize(
    ("tpu", "sizes", "size"),
    [
        ("v6e-8", MeshSizes(dp=2, sp=4), "720P"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("v6e-8", MeshSizes(sp=2, tp=4), "720P"),
                ("v6e-8", MeshSizes(tp=8), "480P"),
                ("v6e-64", MeshSizes(dp=2, sp=32), "720P"),
                ("v6e-64", MeshSizes(dp=2, sp=8, tp=4), "480P"),
                ("v6e-256", MeshSizes(dp=2, sp=16, tp=8), "720P"),
                ("v5p-8", MeshSizes(dp=2, sp=2), "720P"),
                ("v7x-8", MeshSizes(sp=8), "480P"),
                ("v5e-1", MeshSizes(), "480P"),
            ]
        ),
    ],
    ids=str,
)
def test_formulas_for_other_slices(tpu, sizes, size):
    model, slice_ = find_model(WAN_14B), parse_slice(tpu)
    settings = parse_size(size, model)
    work = model.workload(settings)
    program = lower_step(model, settings, work, slice_, sizes)
    result = count_program(program, "partition")
    assert result.unexplained == ()
    assert result.kernels
    assert result.square_arrays == program.facts.square_arrays == ()
    check_formulas(estimate(work, sizes, slice_), program.facts, result)


@pytest.mark.slow
@pytest.mark.tpu
@needs_tpu_compiler
@pytest.mark.parametrize("sizes", [MeshSizes(dp=2, sp=4), MeshSizes(dp=2, tp=4), MeshSizes(sp=8)], ids=str)
def test_the_tpu_compiler_agrees(sizes):
    model = find_model(WAN_14B)
    settings = parse_size("720P", model)
    work = model.workload(settings)
    program = lower_step(model, settings, work, V6E_8, sizes)
    compiled, partitioned = count_program(program, "compile"), count_program(program, "partition")
    assert compiled.unexplained == ()
    assert compiled.sent_bytes == pytest.approx(partitioned.sent_bytes, rel=0.001)
    peak = compiled.peak_bytes(program.facts)
    assert peak <= 0.9 * 32e9
    assert estimate(work, sizes, V6E_8).memory.total == pytest.approx(peak, rel=0.05)


def test_what_does_not_fit_says_what_would(monkeypatch):
    monkeypatch.setattr(planning, "lower_step", lambda *_: pytest.fail("nothing is lowered only to rank"))
    model = find_model(WAN_14B)
    work = model.workload(parse_size("720P", model))
    slice_, sizes = planning._larger(work, parse_slice("v5e-1"))
    assert slice_.device_count == sizes.device_count > 1
    assert estimate(work, sizes, slice_).fits
    assert not any(e.fits for e in planning.rank_layouts(work, dataclasses.replace(slice_, chips=slice_.chips // 2)))


def test_the_compiler_has_the_last_word_on_memory():
    model = find_model("demo")
    plan, _ = make_plan(model, model.defaults, parse_slice("v6e-1"), compile_=False)
    assert not dataclasses.replace(plan, compiler_refused="the TPU compiler …: RESOURCE_EXHAUSTED: 33G of 31G").fits
    assert dataclasses.replace(plan, compiler_refused="the TPU compiler …: no libtpu for this Python").fits
    said = {f"{part}_size_in_bytes": 0 for part in ("argument", "output", "temp", "generated_code", "alias")}
    chosen = plan.chosen
    for temporaries, fits in ((20e9, True), (30e9, False)):
        counted = dataclasses.replace(chosen.partitioned, memory=said | {"temp_size_in_bytes": int(temporaries)})
        compiled = dataclasses.replace(chosen, compiled=counted)
        assert dataclasses.replace(plan, chosen=compiled).fits is fits


def test_square_arrays():
    model = find_model(WAN_14B)
    work = model.workload(model.defaults)
    sizes = MeshSizes(dp=2, sp=4)
    harmless = {(1, 75600, 5120), (40, 18900, 128), (30720, 5120), (1, 10, 75776, 128), (13824, 5120), (75600, 2048)}
    assert square_arrays(harmless, work, sizes) == ()
    for scores in [(1, 10, 75600, 75600), (10, 18900, 75600), (1, 10, 75776, 75776), (40, 18900, 18900)]:
        assert square_arrays(harmless | {scores}, work, sizes) == ("×".join(map(str, scores)),)


def test_sizes():
    model = find_model(WAN_14B)
    settings = parse_size("1280x720x81", model)
    assert (settings.width, settings.height, settings.num_frames) == (1280, 720, 81)
    assert parse_size("848×480", model).num_frames == 81
    assert parse_size("480p", model) == dataclasses.replace(parse_size("848x480x81", model), flow_shift=3.0)
    for text, message in {
        "100x100x5": "size=100x100x5: height=100 is not divisible by 16; use 96 or 112",
        "1280x720x82": r"size=1280x720x82: num_frames=82 is not 4n\+1; use 81 or 85",
        "0x720x81": "size=0x720x81: width=0 is outside",
        "large": "size=large is no size; write width×height×frames as 1280x720x81, or one of 480P, 720P",
    }.items():
        with pytest.raises(InvalidValueError, match=message):
            parse_size(text, model)


def test_models():
    assert find_model("wan2.1-t2v-1.3b-diffusers").name == "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
    assert find_model("demo").config["num_layers"] == 6
    with pytest.raises(InvalidValueError, match="MODEL owner/other is neither a directory nor .* one of Wan-AI/"):
        find_model("owner/other")


def test_a_directory_of_configurations_alone(tmp_path):
    def without_weights(directory, names):
        return [name for name in names if not name.endswith(".json") and not (Path(directory) / name).is_dir()]

    shutil.copytree(DEMO_DIRECTORY, tmp_path / "model", ignore=without_weights)
    shutil.rmtree(tmp_path / "model" / "tokenizer")
    model = find_model(str(tmp_path / "model"))
    assert (model.config, model.vae) == (find_model("demo").config, find_model("demo").vae)
    with pytest.raises(CheckpointError, match="lacks tokenizer"):
        ModelFiles.open(tmp_path / "model")
    (tmp_path / "model" / "vae" / "config.json").unlink()
    with pytest.raises(CheckpointError, match="lacks vae; .* has text_encoder, transformer, vae: download"):
        find_model(str(tmp_path / "model"))


def test_a_mesh_that_does_not_suit():
    model = find_model("demo")
    with pytest.raises(MeshError, match=r"mesh dp=1,sp=4,tp=1 does not suit v6e-8 .* choose from dp=1,sp=8,tp=1; "):
        make_plan(model, model.defaults, V6E_8, mesh="sp=4")
