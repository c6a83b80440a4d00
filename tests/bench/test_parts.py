"""Every part of a run, in this process: everybody computes the same, and nothing fails."""

import os

import pytest
import torch

from comfy_tpu.bench import machine, runner
from comfy_tpu.bench.job import DEVICES, PARTS, Job
from comfy_tpu.bench.machine import Bench
from comfy_tpu.bench.models import find_bench_model
from comfy_tpu.bench.random_modules import in_float32, random_module
from comfy_tpu.bench.results import Row
from comfy_tpu.bench.timing import compiled, prefer_attention
from comfy_tpu.bench.transformer import Forward
from comfy_tpu.bench.vae import vae_inputs
from comfy_tpu.bridge import to_host
from comfy_tpu.compiler.weights import adopt
from comfy_tpu.families.registry import family_cards
from comfy_tpu.parallel.mesh import make_placement
from tests.covering import covering

CPU = torch.device("cpu")
MODELS = ("demo", "demo-image", *(f"small:{card.name}" for card in family_cards()))
ONE_EACH = [
    ("vae", "demo-image"),  # with a cache of the frames before, both ways
    ("vae", "small:flux"),  # an image that denoising starts from
    ("text", "small:flux"),  # two encoders
    ("compile", "demo"),
]
"""Parts and models that run by default; a forward is in test_our_step_is_diffusers_forward."""


def run(part, model, tmp_path, **options):
    """Rows by what and peer."""
    emitted = []
    chosen = {"size": find_bench_model(model).default_sizes[0], "dtype": "float32", "repeats": 1, "steps": 1}
    job = Job(part, model=model, peers=("ours", "eager"), cache_directory=str(tmp_path), **{**chosen, **options})
    runner.work(job, emitted.append)
    rows = [message for message in emitted if isinstance(message, Row)]
    assert not [row.traceback for row in rows if row.failure]
    return {(row.what, row.peer): row for row in rows}


@covering("part, model", [part for part in PARTS if part != "scaling"], MODELS, strength=0, always=ONE_EACH)
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
            assert row.flops > 0
    if part == "vae":
        assert whats == ({"decode", "encode"} if takes_images else {"decode"})
    if part == "compile":
        directions = ["vae decode", "vae encode"] if takes_images else ["vae decode"]
        assert {f"{what}, cold" for what in ["transformer", *directions, "text encoder"]} <= whats
        assert not any(row.facts["from_cache"] for row in rows.values())


@covering("model, mesh", ["small:flux", "small:ltx_video"], ["single", "dp=2,sp=2,tp=2"], strength=1)
def test_our_step_is_diffusers_forward(model, mesh, tmp_path):
    rows = run("accuracy", model, tmp_path, mesh=mesh)
    assert rows["forward of 2 blocks", "eager"].error == 0
    ours = rows["forward of 2 blocks", "ours"]
    assert 0 < ours.error < 5e-5
    assert (ours.facts.get("mesh"), ours.facts.get("batch")) == ((None, None) if mesh == "single" else (mesh, 2))


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
        reference = in_float32(module, spec, model.config(spec))
        for name, tensor in module.state_dict().items():  # tied weights under both of their names
            assert torch.equal(reference.state_dict()[name], tensor.float()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_of_torch_is_adopted_by_jax(dtype):
    # What a CUDA tensor goes through on a GPU; on a CPU the same calls work on host memory.
    tensor = torch.randn(3, 5).to(dtype)
    placement = make_placement("single")
    array = adopt(tensor, placement.sharding())
    assert array.sharding == placement.sharding()
    assert torch.equal(to_host(array), tensor)


def test_compiled_parts_leave_the_module_as_it_was(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda module, dynamic: torch.nn.Sequential(module))
    module = torch.nn.Module()
    module.blocks, module.head = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()]), torch.nn.ReLU()
    twin = compiled(module, ("blocks",))
    assert [type(block) for block in twin.blocks] == [torch.nn.Sequential] * 2
    assert twin.head is module.head
    assert type(module.blocks[0]) is torch.nn.Identity
    assert type(compiled(module, ("head",)).head) is torch.nn.Sequential


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
