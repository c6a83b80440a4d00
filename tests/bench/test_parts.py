"""Parts of a run on small models of two families, in this process: everybody computes the same."""

import types

import pytest
import torch

from comfy_tpu.bench import compilation, text, transformer, vae
from comfy_tpu.bench.candidates import compiled, prefer_attention
from comfy_tpu.bench.devices import Bench
from comfy_tpu.bench.job import Job
from comfy_tpu.bench.models import find_bench_model
from comfy_tpu.bench.modules import in_float32, random_module
from comfy_tpu.bridge import to_host
from comfy_tpu.compiler.weights import adopt
from comfy_tpu.config import MeshSizes
from comfy_tpu.parallel.chips import parse_slice
from comfy_tpu.parallel.layouts import estimate
from comfy_tpu.parallel.mesh import make_placement

CPU = torch.device("cpu")
FAMILIES = ("flux", "ltx_video")


class Progress:
    def __init__(self):
        self.rows, self.notes = {}, []

    def row(self, row):
        assert row.failure is None, row.traceback
        self.rows[row.what, row.peer] = row

    def note(self, text):
        self.notes.append(text)


def run(measure, part, family, tmp_path, **options):
    model = f"small:{family}"
    size = find_bench_model(model).default_sizes[0]
    progress = Progress()
    measure(Job(part, model=model, size=size, repeats=1, cache_directory=str(tmp_path), **options), progress)
    return progress.rows


@pytest.mark.parametrize("mesh", ["single", "dp=2,sp=2,tp=2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_our_step_is_diffusers_forward(family, mesh, tmp_path):
    rows = run(transformer.measure_accuracy, "accuracy", family, tmp_path, mesh=mesh)
    assert rows["forward of 2 blocks", "eager"].error == 0
    assert 0 < rows["forward of 2 blocks", "ours"].error < 5e-5
    assert rows["forward of 2 blocks", "ours"].facts.get("mesh") == (None if mesh == "single" else mesh)


@pytest.mark.parametrize("family", FAMILIES)
def test_our_decoder_is_diffusers(family, tmp_path):
    rows = run(vae.measure_vae, "vae", family, tmp_path)
    assert 0 < rows["decode", "ours"].error < 1e-4
    assert len(rows["decode", "ours"].samples) == len(rows["decode", "eager"].samples) == 1
    assert rows["decode", "ours"].flops > 0


def test_text_encoders(tmp_path):
    rows = run(text.measure_text, "text", "flux", tmp_path)
    whats = {what for what, _ in rows}
    assert whats == {"text_encoder encode 77 tokens", "text_encoder_2 encode 64 tokens"}
    assert all(row.error < 1e-4 for row in rows.values())
    assert all(rows[what, "ours"].error > 0 for what in whats)


def test_compilation(tmp_path):
    rows = run(compilation.measure_compilation, "compile", "flux", tmp_path)
    assert {what for what, _ in rows} == {
        f"{what}, cold" for what in ("transformer", "vae decode", "text encoder", "text encoder 2")
    }
    assert all(row.facts["from_cache"] is False for row in rows.values())


def test_a_family_without_a_reference_is_measured_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("comfy_tpu.bench.models.load_references", lambda family: ({}, {}))
    model = find_bench_model("small:ltx_video")
    assert model.reference is None
    assert model.configs["transformer"]["num_layers"] == 2
    bench = Bench.open(Job("transformer", model="small:ltx_video", cache_directory=str(tmp_path)))
    forward = transformer.Forward(torch.nn.Identity(), None, *[None] * 4)
    with pytest.raises(NotImplementedError, match=r"small:ltx_video: its family has no reference\.py"):
        forward.run(bench, None)


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_have_finite_weights_in_diffusers_dtypes(family):
    model = find_bench_model(f"small:{family}")
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


# torch's own, when it imports the compiler.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_compiled_parts_leave_the_module_as_it_was():
    model = find_bench_model("small:flux")
    spec = model.family.transformer
    module = random_module(spec, model.config(spec), device=CPU, dtype=torch.float32)
    twin = compiled(module, ("transformer_blocks",))
    assert [type(block).__name__ for block in twin.transformer_blocks] == ["OptimizedModule"] * 2
    assert twin.x_embedder is module.x_embedder
    assert type(module.transformer_blocks[0]).__name__ == "FluxTransformerBlock"


def test_a_preferred_attention_leaves_torch_as_it_was():
    before = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
    with prefer_attention("EFFICIENT_ATTENTION"):
        query = torch.randn(1, 2, 4, 8)
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    with prefer_attention(""):
        pass
    assert (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()) == before


@pytest.mark.parametrize(("chip", "is_known"), [("v6e", True), ("nvidia h100", False)])
def test_a_step_on_a_tpu_has_the_plans_estimate_beside_it(chip, is_known):
    model = find_bench_model("small:flux")
    work = model.workload(model.forward_settings(model.default_sizes[0], 2))
    placement = types.SimpleNamespace(chip=chip, sizes=MeshSizes(dp=2, sp=4))
    facts = transformer.expectation(types.SimpleNamespace(placement=placement, model=model), work)
    assert facts["classes"] == ["FluxTransformer2DModel"]
    expected = estimate(work, MeshSizes(dp=2, sp=4), parse_slice("v6e-8")).step_seconds
    assert facts.get("expected_s") == (expected if is_known else None)
