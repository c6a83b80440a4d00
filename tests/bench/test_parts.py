"""Every part of a run, in this process: everybody computes the same, and nothing fails."""

import dataclasses
import os
import types

import pytest
import torch

from comfy_tpu.bench import compilation, machine, random_modules, runner
from comfy_tpu.bench.job import DEVICES, PARTS, Job
from comfy_tpu.bench.machine import Bench
from comfy_tpu.bench.models import find_bench_model
from comfy_tpu.bench.random_modules import float32_copy, random_module
from comfy_tpu.bench.results import Row
from comfy_tpu.bench.timing import compile_module, prefer_attention
from comfy_tpu.bench.transformer import Forward, abstract_step, describe_expectation, measure_ceilings
from comfy_tpu.bench.vae import VaeStream, vae_inputs
from comfy_tpu.bridge import to_host
from comfy_tpu.compiler.program import ProgramEvent
from comfy_tpu.compiler.weights import alias_torch_tensor
from comfy_tpu.config import FAST, MeshSizes
from comfy_tpu.families.reference import load_references
from comfy_tpu.families.registry import family_cards
from comfy_tpu.parallel.chips import parse_slice
from comfy_tpu.parallel.layouts import estimate
from comfy_tpu.parallel.mesh import make_placement
from comfy_tpu.pipeline.step import StepPrograms
from tests.covering import covering

CPU = torch.device("cpu")
MODELS = ("demo", "demo-image", *(f"small:{card.name}" for card in family_cards() if load_references(card)[0]))


def run(part, model, tmp_path, **options):
    """Rows by what and peer."""
    emitted = []
    chosen = {"size": find_bench_model(model).default_sizes[0], "dtype": "float32", "repeats": 1, "steps": 2}
    chosen |= {"peers": ("ours", "eager"), **options}
    job = Job(part, model=model, cache_directory=str(tmp_path), **chosen)
    runner.run_part(job, emitted.append)
    rows = [message for message in emitted if isinstance(message, Row)]
    assert not [row.traceback for row in rows if row.failure]
    return {(row.what, row.peer): row for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("part", [part for part in PARTS if part != "scaling"])
def test_every_part_of_every_model(part, model, tmp_path):
    if (part, model) == ("end-to-end", "demo-image"):
        pytest.skip("a model that begins with an image")
    rows = run(part, model, tmp_path)
    takes_images = find_bench_model(model).family.card.image is not None
    whats = {what for what, _ in rows}
    for (_, peer), row in rows.items():
        assert (row.error or 0) < 1e-4
        assert len(row.samples) == (0 if part == "accuracy" else 1)
        if part in ("vae", "text") and peer == "ours":
            assert row.error > 0
        if part == "vae":
            assert row.flops > 0
    if part == "vae":
        assert whats == ({"decode", "encode"} if takes_images else {"decode"})
    if part == "compile":
        directions = ["vae decode", "vae encode"] if takes_images else ["vae decode"]
        assert {f"{what}, cold" for what in ["transformer", *directions, "text encoder"]} <= whats
        assert not any(row.facts["from_cache"] for row in rows.values())


def test_the_program_that_is_compiled_is_that_of_a_step():
    """By its inputs, which others name: it is traced, and no more."""
    model = find_bench_model("small:flux")
    bench = Bench.open(Job("compile", model="small:flux", size=model.default_sizes[0], dtype="float32"), [].append)
    component = bench.component(model.family.transformer, model.config(model.family.transformer))
    weights, inputs = abstract_step(bench, component, bench.job.size)
    samples, _ = StepPrograms(model.family.denoiser, component.program).compute().shapes(weights, **inputs)
    assert samples[0].shape == inputs["samples"][0].shape


@pytest.mark.slow
def test_the_preset_end_to_end(tmp_path):
    rows = run("end-to-end", "small", tmp_path, peers=("ours", "fast"), steps=4)
    facts = rows["4 steps with guidance", "fast"].facts
    assert facts["forwards"] == 4 + 3, "all steps, for want of a curve, and three of them with guidance"
    assert (facts["reuse"], facts["guidance_until"], facts["quantize"]) == (0.0, FAST.guidance_until, "none")
    assert "forwards" not in rows["4 steps with guidance", "ours"].facts


@pytest.mark.slow  # tests/cli/test_bench.py has one by default
@pytest.mark.parametrize("mesh", ["single", "dp=2,sp=2,tp=2"])
@pytest.mark.parametrize("model", ["small:flux", "small:ltx_video"])
def test_our_step_is_diffusers_forward(model, mesh, tmp_path):
    rows = run("accuracy", model, tmp_path, mesh=mesh)
    assert rows["forward of 2 blocks", "eager"].error == 0
    assert 0 < rows["forward of 2 blocks", "ours"].error < 5e-5


def test_the_best_rates_of_the_device():
    emitted = []
    bench = Bench.open(
        Job("transformer", model="small:flux", size="96x64x1", dtype="float32", repeats=1), emitted.append
    )
    assert measure_ceilings(bench) == "FLASH_ATTENTION"
    assert not [row.traceback for row in emitted if row.failure]
    assert [(row.what, row.peer) for row in emitted if row.peer != "torch"] == [
        ("matmul 512×512×512", "jax"),
        ("matmul 24×128×512", "jax"),
        ("attention", "jax, as our program calls it"),
        ("attention", "torch FLASH_ATTENTION"),
    ]


@pytest.fixture
def tiny_vae(monkeypatch):
    """The small Flux with two levels in its VAE, not four, which is the time of compiling it."""
    model = find_bench_model("small:flux")
    levels = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    vae = {**model.configs["vae"], **levels, "block_out_channels": (8, 8), "norm_num_groups": 2}
    card = dataclasses.replace(model.family.card, spatial_scale=2)
    family = dataclasses.replace(model.family, card=card)
    model = dataclasses.replace(model, family=family, configs={**model.configs, "vae": vae})
    monkeypatch.setattr(machine, "find_bench_model", lambda name: model)
    # Two seconds of imports in torch; the slow tests count.
    monkeypatch.setattr(random_modules, "count_operations", lambda module, call: 7.0)


@pytest.mark.thorough  # by default: tests/parity
@pytest.mark.usefixtures("tiny_vae")
def test_our_vae_is_diffusers_both_ways(tmp_path):
    rows = run("vae", "small:flux", tmp_path, size="32x16x1")
    assert list(rows) == [(what, peer) for what in ("decode", "encode") for peer in ("ours", "eager")]
    for what in ("decode", "encode"):
        assert 0 < rows[what, "ours"].error < 1e-4
        assert rows[what, "eager"].error == 0
        assert len(rows[what, "ours"].samples) == len(rows[what, "eager"].samples) == 1
        assert rows[what, "ours"].flops == 7.0
        assert rows[what, "ours"].facts["programs"] == 1


@pytest.mark.slow
def test_the_vae_of_another_backend_has_rows_of_its_own(tmp_path, monkeypatch):
    pytest.importorskip("flax")
    monkeypatch.setattr(random_modules, "count_operations", lambda module, call: 7.0)
    rows = run("vae", "small:wan", tmp_path, size="32x32x5", vae_backend="nnx")
    assert list(rows) == [("decode, VAE by nnx", peer) for peer in ("ours", "eager")]
    assert 0 < rows["decode, VAE by nnx", "ours"].error < 1e-4


def test_a_video_goes_through_the_vae_part_by_part():
    bench = Bench.open(Job("vae", model="demo-image", dtype="float32"))
    pixels, latents = torch.zeros(1, 3, 17, 64, 64), torch.zeros(1, 16, 5, 8, 8)
    streams = {"pixels": VaeStream.encode(bench, pixels), "latent": VaeStream.decode(bench, latents)}
    assert [part["pixels"].shape[2] for part in streams["pixels"].parts] == [1, 4, 4, 4, 4]
    assert [part["latent"].shape[2] for part in streams["latent"].parts] == [1] * 5
    for name, stream in streams.items():
        assert stream.columns == 8
        seen = []

        def compute(cache, seen=seen, **part):
            seen.append((set(part), cache))
            return f"output {len(seen)}", f"cache {len(seen)}"

        assert stream.run(compute, stream.parts) == [f"output {count}" for count in range(1, 6)]
        assert seen == [({name}, None), *(({name}, f"cache {count}") for count in range(1, 5))]


def test_compilation(tmp_path, monkeypatch):
    for name in ("_compile_step", "compile_vae"):
        monkeypatch.setattr(compilation, name, lambda *arguments: arguments[-1](ProgramEvent("x", "ready", 2.0)))
    rows = run("compile", "small:ltx_video", tmp_path)
    names = ("transformer", "vae decode", "vae encode", "text encoder")
    assert list(rows) == [(f"{name}, cold", "ours") for name in names]
    assert rows["vae encode, cold", "ours"].samples == (2.0,)
    facts = rows["text encoder, cold", "ours"].facts
    assert facts["from_cache"] is False
    assert rows["text encoder, cold", "ours"].samples == (facts["trace_s"] + facts["lower_s"] + facts["compile_s"],)
    assert min(facts["import_s"], facts["build_s"]) > 0


def test_text_encoders_are_named_where_there_are_two(tmp_path, monkeypatch):
    monkeypatch.setattr("comfy_tpu.bench.text.measure_module", lambda bench, row, **more: bench.emit(row))
    assert {what for what, _ in run("text", "small:flux", tmp_path)} == {
        "text_encoder encode 77 tokens",
        "text_encoder_2 encode 64 tokens",
    }
    assert {what for what, _ in run("text", "demo", tmp_path)} == {"encode 512 tokens"}


@pytest.mark.parametrize(
    ("model", "frames"),
    [
        ("Wan2.1-T2V-14B-Diffusers", None),
        ("Wan2.1-I2V-14B-480P-Diffusers", 81),
        ("LTX-Video", 1),  # reads the first frame alone
        ("FLUX.1-dev", 1),
        ("FLUX.2-dev", 1),
    ],
)
def test_pixels_are_encoded_where_the_card_says_that_a_model_takes_images(model, frames):
    size = find_bench_model(model).default_sizes[0]
    shapes = vae_inputs(Bench.open(Job("vae", model=model, size=size, dtype="float32")), size)
    settings = find_bench_model(model).settings(size)
    assert shapes.get("encode") == (None if frames is None else (1, 3, frames, settings.height, settings.width))


def test_a_demo_grows_and_is_timed_as_a_small_model():
    demo = find_bench_model("demo")
    assert demo.is_small
    assert demo.scaling_sizes() == ("64x64x17", "128x128x17", "192x192x17", "256x256x17")


def test_a_family_without_a_reference_is_measured_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("comfy_tpu.bench.models.load_references", lambda family: ({}, {}))
    model = find_bench_model("small:ltx_video")
    assert model.configs["transformer"]["num_layers"] == 2
    with pytest.raises(NotImplementedError, match=r"small:ltx_video: its family has no reference\.py"):
        model.find_reference()


@pytest.mark.slow
def test_operations_are_divided_by_virtual_devices(tmp_path):
    rows = run(DEVICES, "small", tmp_path)
    counted = [row.facts["flops_per_device"] for row in rows.values()]
    assert counted[0] > 1.8 * counted[1] > 3.2 * counted[2] > 5.6 * counted[3]


def test_a_forward_of_another_size_shares_the_weights():
    bench = Bench.open(Job("scaling", model="small:flux", dtype="float32"))
    config = bench.model.config(bench.model.family.transformer)
    first = Forward(bench, "96x64x1", config)
    second = Forward(bench, "192x128x1", config, first)
    assert second.module is first.module
    assert second.load is first.load
    assert second.latents.numel() == 4 * first.latents.numel()


@covering("name", ["small:flux", "small:ltx_video"], strength=0, always=[("small:flux",)])
def test_modules_have_finite_weights_in_diffusers_dtypes(name):
    model = find_bench_model(name)
    for spec in model.family.components:
        module = random_module(spec, model.config(spec), device=CPU, dtype=torch.bfloat16)
        kept = set(getattr(module, "_keep_in_fp32_modules", None) or ())
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            assert tensor.device == CPU, name
            assert torch.isfinite(tensor).all(), name
        for name, parameter in module.named_parameters():
            assert parameter.dtype == (torch.float32 if kept & set(name.split(".")) else torch.bfloat16), name
        reference = float32_copy(module, spec, model.config(spec))
        for name, tensor in module.state_dict().items():  # tied weights under both of their names
            assert torch.equal(reference.state_dict()[name], tensor.float()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_of_torch_is_adopted_by_jax(dtype):
    # What a CUDA tensor goes through on a GPU; on a CPU the same calls work on host memory.
    tensor = torch.randn(3, 5).to(dtype)
    placement = make_placement("single")
    array = alias_torch_tensor(tensor, placement.sharding())
    assert array.sharding == placement.sharding()
    assert torch.equal(to_host(array), tensor)


def test_compiled_parts_leave_the_module_as_it_was(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda module, dynamic: torch.nn.Sequential(module))
    module = torch.nn.Module()
    module.blocks, module.head = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()]), torch.nn.ReLU()
    twin = compile_module(module, ("blocks",))
    assert [type(block) for block in twin.blocks] == [torch.nn.Sequential] * 2
    assert twin.head is module.head
    assert type(module.blocks[0]) is torch.nn.Identity
    assert type(compile_module(module, ("head",)).head) is torch.nn.Sequential


def test_a_preferred_attention_leaves_torch_as_it_was():
    before = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
    with prefer_attention("EFFICIENT_ATTENTION"):
        query = torch.randn(1, 2, 4, 8)
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    with prefer_attention(""):
        pass
    assert (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()) == before


def test_versions_and_processor():
    facts = machine.describe_machine()
    assert {"torch", "jax", "diffusers", "python"} <= {name for name, version in facts["versions"].items() if version}
    assert facts["hardware"]["platform"] == "cpu"
    assert 1 <= facts["hardware"]["processor_cores"] <= (os.cpu_count() or 1)


@pytest.mark.parametrize(("chip", "is_known"), [("v6e", True), ("nvidia h100", False)])
def test_a_step_on_a_tpu_has_the_plans_estimate_beside_it(chip, is_known):
    model = find_bench_model("small:flux")
    work = model.workload(model.settings(model.default_sizes[0]))
    placement = types.SimpleNamespace(chip=chip, sizes=MeshSizes(dp=2, sp=4))
    facts = describe_expectation(types.SimpleNamespace(placement=placement, model=model), work)
    assert facts["classes"] == ["FluxTransformer2DModel"]
    expected = estimate(work, MeshSizes(dp=2, sp=4), parse_slice("v6e-8")).step_seconds
    assert facts.get("expected_s") == (expected if is_known else None)
