"""The peers' modules: the same numbers as ours, in the dtypes that diffusers would load them in."""

import pytest
import torch

from comfy_tpu.bench import vae
from comfy_tpu.bench.devices import Bench, relative_error
from comfy_tpu.bench.job import SMALL, Job
from comfy_tpu.bench.peers import compiled, preferring
from comfy_tpu.bench.references import in_float32, random_module
from comfy_tpu.bridge import to_host
from comfy_tpu.compiler.component import Component
from comfy_tpu.compiler.host_weights import HostWeights
from comfy_tpu.compiler.weights import adopt
from comfy_tpu.families.wan import text as wan_text
from comfy_tpu.families.wan import transformer as wan_transformer
from comfy_tpu.families.wan import vae as wan_vae
from comfy_tpu.parallel.mesh import make_placement

CPU = torch.device("cpu")
COMPONENTS = [
    (wan_transformer.TRANSFORMER, SMALL.transformer),
    (wan_text.TEXT_ENCODER, SMALL.text_encoder),
    (wan_vae.VAE, SMALL.vae),
]


@pytest.mark.parametrize(("spec", "config"), COMPONENTS, ids=lambda value: getattr(value, "name", ""))
def test_nothing_is_left_without_a_value(spec, config):
    module = random_module(spec, config, device=CPU, dtype=torch.bfloat16)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        assert tensor.device == CPU, name
        assert torch.isfinite(tensor).all(), name
    again = random_module(spec, config, device=CPU, dtype=torch.bfloat16)
    assert all(torch.equal(one, two) for one, two in zip(module.parameters(), again.parameters(), strict=True))


def test_dtypes_are_those_of_diffusers():
    module = random_module(wan_transformer.TRANSFORMER, SMALL.transformer, device=CPU, dtype=torch.bfloat16)
    kept = type(module)._keep_in_fp32_modules
    for name, parameter in module.named_parameters():
        expected = torch.float32 if any(part in name for part in kept) else torch.bfloat16
        assert parameter.dtype == expected, name


def test_tied_weights_stay_tied():
    module = random_module(wan_text.TEXT_ENCODER, SMALL.text_encoder, device=CPU, dtype=torch.float32)
    assert module.shared.weight is module.encoder.embed_tokens.weight


def test_the_reference_has_the_same_numbers_in_float32():
    module = random_module(wan_transformer.TRANSFORMER, SMALL.transformer, device=CPU, dtype=torch.bfloat16)
    reference = in_float32(module, wan_transformer.TRANSFORMER, SMALL.transformer)
    for (name, one), two in zip(reference.named_parameters(), module.parameters(), strict=True):
        assert one.dtype == torch.float32, name
        assert torch.equal(one, two.float()), name
    assert not any(buffer.is_meta for buffer in reference.buffers())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_of_torch_is_adopted_by_jax(dtype):
    # What a CUDA tensor goes through on a GPU; on a CPU the same calls work on host memory.
    tensor = torch.randn(3, 5).to(dtype)
    placement = make_placement("single")
    array = adopt(tensor, placement.sharding())
    assert array.sharding == placement.sharding()
    assert torch.equal(to_host(array), tensor)


def test_our_encoder_by_frames_is_diffusers_encoder():
    job = Job("vae", size="32x16x9", cache_directory="build/test-programs")
    bench = Bench.open(job)
    module = random_module(wan_vae.VAE, SMALL.vae, device=CPU, dtype=torch.float32)
    pixels = bench.random(1, 3, 9, 16, 32, seed=1).clamp(-1, 1)
    entrant = vae.encode_call(bench, job, module, pixels)
    with torch.no_grad():
        expected = vae.encode(module, pixels)
    assert relative_error(entrant.read(entrant.call()), expected) < 1e-4
    assert entrant.facts["programs"] == 3


# torch's own, when it imports the compiler.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_compiled_parts_leave_the_module_as_it_was():
    module = random_module(wan_vae.VAE, SMALL.vae, device=CPU, dtype=torch.float32)
    twin = compiled(module, ("decoder",))
    assert twin.decoder is not module.decoder
    assert twin.encoder is module.encoder
    assert type(module.decoder).__name__ == "WanDecoder3d"
    blocks = compiled(
        random_module(wan_transformer.TRANSFORMER, SMALL.transformer, device=CPU, dtype=torch.float32), ("blocks",)
    )
    assert [type(block).__name__ for block in blocks.blocks] == ["OptimizedModule"] * 2


def test_a_preferred_attention_leaves_torch_as_it_was():
    before = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
    with preferring("EFFICIENT_ATTENTION"):
        query = torch.randn(1, 2, 4, 8)
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    with preferring(""):
        pass
    assert (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()) == before


def test_components_load_from_the_peers_module():
    module = random_module(wan_text.TEXT_ENCODER, SMALL.text_encoder, device=CPU, dtype=torch.float32)
    component = Component(wan_text.TEXT_ENCODER, SMALL.text_encoder, make_placement("single"), dtype=torch.float32)
    weights = component.load(HostWeights(module))
    assert torch.equal(to_host(weights["shared.weight"]), module.shared.weight)
