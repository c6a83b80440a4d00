"""Coming and going: the node taken away, Cancel, Free, and models that nobody holds any more."""

import gc
import logging
import weakref

import pytest
import torch

from tests.native.models import (
    DECIBELS,
    TOLERANCE,
    compile_model,
    every_architecture,
    models,
    some_architectures,
)

pytestmark = pytest.mark.comfyui


@every_architecture
def test_without_the_node_again(architecture, comfyui):
    """Bit for bit what ComfyUI gave before our node was ever there."""
    from tests.native.loras import apply_lora, write_lora
    from tests.native.sampling import sample

    plain = architecture.build(seed=31)
    write_lora(plain, comfyui / "models" / "loras" / "before.safetensors", seed=1)
    weights = {name: tensor.clone() for name, tensor in plain.model.state_dict().items()}

    def with_lora(model):
        return apply_lora(model, "before.safetensors", 0.6)

    before = sample(plain, architecture, steps=2), sample(with_lora(plain), architecture, steps=2)
    attributes = {path: sorted(vars(part)) for path, part in plain.model.named_modules()}
    compiled = compile_model(plain)
    for model in (compiled, with_lora(compiled), compiled):
        sample(model, architecture, steps=2)
    after = sample(plain, architecture, steps=2), sample(with_lora(plain), architecture, steps=2)
    assert all(map(torch.equal, before, after))
    sample(with_lora(compiled), architecture, steps=1)
    assert torch.equal(sample(plain, architecture, steps=2), before[0])
    plain.detach()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in plain.model.state_dict().items())
    # ComfyUI puts a replaced method back as an attribute, which is the class's own.
    ours = {
        (path, name)
        for path, part in plain.model.named_modules()
        for name in set(vars(part)) - set(attributes[path])
        if getattr(vars(part)[name], "__func__", None) is not getattr(type(part), name, part)
    }
    assert ours == set()


@some_architectures("Wan 2.1 T2V")
def test_the_original_is_unharmed(architecture):
    plain = architecture.build(seed=32)
    options, patches = str(plain.model_options), dict(plain.object_patches)
    compile_model(plain)
    assert str(plain.model_options) == options
    assert plain.object_patches == patches
    assert "_forward" not in vars(plain.model.diffusion_model)


@some_architectures("Wan 2.1 T2V")
def test_the_node_twice_and_two_choices(architecture, watch):
    from tests.native.sampling import psnr, relative_error, sample

    plain = models(architecture).plain
    expected = sample(plain, architecture)
    twice = compile_model(compile_model(plain, precision="bfloat16"))
    other = compile_model(plain, precision="bfloat16")
    for _ in range(2):
        assert relative_error(expected, sample(twice, architecture)) < TOLERANCE
        assert psnr(expected, sample(other, architecture)) > DECIBELS
    assert relative_error(expected, sample(other, architecture)) > 1e-4
    watch.assert_on_devices()


@some_architectures("Wan 2.1 T2V", "SDXL")
def test_cancel(architecture, watch):
    """Takes effect before the next step, and leaves nothing behind."""
    import comfy.model_management

    from tests.native.sampling import relative_error, sample

    both = models(architecture)
    expected = sample(both.plain, architecture)
    sample(both.compiled, architecture)
    model = both.compiled.clone()
    watch.clear()

    def press_cancel(args):
        if len(watch.calls) == 2:
            comfy.model_management.interrupt_current_processing()
        return args["denoised"]

    model.set_model_sampler_post_cfg_function(press_cancel)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        sample(model, architecture, steps=9)
    assert len(watch.calls) == 2
    assert not comfy.model_management.processing_interrupted()
    assert relative_error(expected, sample(both.compiled, architecture)) < TOLERANCE
    assert watch.warnings == []


@some_architectures("Wan 2.1 T2V")
def test_cancel_while_weights_are_loaded(architecture, watch, monkeypatch):
    import comfy.model_management

    from comfy_tpu.compiler.host_weights import HostWeights
    from comfy_tpu.compiler.residency import shared_residency
    from tests.native.sampling import relative_error, sample

    plain = architecture.build(seed=33)
    compiled = compile_model(plain)
    read, count = HostWeights.read, []

    def reading(self, name):
        count.append(name)
        if len(count) == 5:
            comfy.model_management.interrupt_current_processing()
        return read(self, name)

    shared_residency().clear()
    with monkeypatch.context() as patch:
        patch.setattr(HostWeights, "read", reading)
        with pytest.raises(comfy.model_management.InterruptProcessingException):
            sample(compiled, architecture)
    assert len(count) < len(plain.model.diffusion_model.state_dict())
    assert shared_residency().entries() == ()
    assert relative_error(sample(plain, architecture), sample(compiled, architecture)) < TOLERANCE


@some_architectures("Wan 2.1 T2V", "Flux.1")
def test_free(architecture, watch):
    """ComfyUI's Free empties our devices; the next run fills them again and compiles nothing."""
    import comfy.model_management

    from comfy_tpu.compiler.residency import shared_residency
    from tests.native.sampling import sample

    compiled = models(architecture).compiled
    before = sample(compiled, architecture)
    assert shared_residency().entries()
    comfy.model_management.unload_all_models()
    assert shared_residency().entries() == ()
    assert sum(shared_residency().bytes_per_device().values()) == 0
    watch.clear()
    assert torch.equal(before, sample(compiled, architecture))
    assert watch.compiled == []
    assert shared_residency().entries()


@some_architectures("Wan 2.1 T2V")
def test_free_with_a_lora(architecture, comfyui):
    import comfy.model_management

    from tests.native.loras import apply_lora, write_lora
    from tests.native.sampling import relative_error, sample

    both = models(architecture)
    write_lora(both.plain, comfyui / "models" / "loras" / "freed.safetensors", seed=2)
    plain, compiled = (apply_lora(model, "freed.safetensors", 0.9) for model in (both.plain, both.compiled))
    expected = sample(plain, architecture)
    for _ in range(2):
        assert relative_error(expected, sample(compiled, architecture)) < TOLERANCE
        comfy.model_management.unload_all_models()
    assert relative_error(sample(both.plain, architecture), sample(both.compiled, architecture)) < TOLERANCE


@every_architecture
def test_a_model_that_nobody_holds(architecture, caplog):
    """It goes, with its memory on the devices, and ComfyUI sees no leak."""
    import comfy.model_management

    from comfy_tpu.compiler.residency import shared_residency
    from tests.native.sampling import sample

    comfy.model_management.unload_all_models()
    gc.collect()
    plain = architecture.build(seed=34)
    compiled = compile_model(plain)
    sample(compiled, architecture, steps=1)
    entries = len(shared_residency().entries())
    assert entries
    gone = weakref.ref(plain.model), weakref.ref(plain.model.diffusion_model)
    gc.disable()
    try:
        with caplog.at_level(logging.INFO):
            del plain, compiled
            comfy.model_management.cleanup_models_gc()
            comfy.model_management.cleanup_models()
        assert "leak" not in caplog.text
        assert gone[1]() is None, "a cycle holds it until a garbage collection"
        assert gone[0]() is None
    finally:
        gc.enable()
    assert len(shared_residency().entries()) == entries - 1
    assert sum(shared_residency().bytes_per_device().values()) == 0


@some_architectures("Wan 2.1 T2V")
def test_a_model_that_nobody_holds_after_a_lora_and_a_cancel(architecture, comfyui, caplog):
    import comfy.model_management

    from comfy_tpu.compiler.residency import shared_residency
    from tests.native.loras import apply_lora, write_lora
    from tests.native.sampling import sample

    comfy.model_management.unload_all_models()
    plain = architecture.build(seed=35)
    write_lora(plain, comfyui / "models" / "loras" / "held.safetensors", seed=2)
    compiled = apply_lora(compile_model(plain), "held.safetensors", 1.0)
    sample(compiled, architecture, steps=1)
    comfy.model_management.interrupt_current_processing()
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        sample(compiled, architecture, steps=1)
    gone = weakref.ref(plain.model)
    with caplog.at_level(logging.WARNING):
        del plain, compiled
        gc.collect()
        comfy.model_management.cleanup_models_gc()
        comfy.model_management.cleanup_models()
    assert gone() is None
    assert "leak" not in caplog.text
    assert shared_residency().entries() == ()


@some_architectures("Wan 2.1 T2V")
def test_too_little_memory_on_the_devices(architecture, watch, monkeypatch):
    """ComfyUI's own out-of-memory error comes out, and the next run works."""
    import comfy.model_management

    from comfy_tpu.compiler.program import Program
    from comfy_tpu.errors import device_errors
    from tests.native.sampling import relative_error, sample

    both = models(architecture)

    def full(self, *args, **kwargs):
        with device_errors(self.name):
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes")

    with monkeypatch.context() as patch:
        patch.setattr(Program, "__call__", full)
        with pytest.raises(comfy.model_management.OOM_EXCEPTION, match="does not fit in device memory"):
            sample(both.compiled, architecture)
    assert relative_error(sample(both.plain, architecture), sample(both.compiled, architecture)) < TOLERANCE


@some_architectures("Wan 2.1 T2V")
def test_wan_2_2s_pair(architecture, watch, cell):
    """Two models, each for a part of the steps, as two KSampler (Advanced) nodes do it."""
    import nodes

    from tests.native.architectures import noise
    from tests.native.sampling import relative_error

    cell.at("MODEL", "Wan 2.2 14B T2V, both models", "euler")
    pairs = [architecture.build(seed=seed) for seed in (36, 37)]
    prompts = architecture.prompt(20, 1), architecture.prompt(20, 2)
    latent = {"samples": noise(4, 1, *architecture.latents[0])}

    def run(high, low, sampler="euler"):
        settings = (5, 4, 3.5, sampler, "simple", *prompts)
        with torch.inference_mode():
            (half,) = nodes.KSamplerAdvanced().sample(high, "enable", *settings, latent, 0, 2, "enable")
            (done,) = nodes.KSamplerAdvanced().sample(low, "disable", *settings, half, 2, 10000, "disable")
        return done["samples"]

    compiled = [compile_model(model) for model in pairs]
    expected = run(*pairs)
    assert cell.error(relative_error(expected, run(*compiled))) < TOLERANCE
    assert len(watch.compiled) == 2
    assert cell.error(relative_error(expected, run(*compiled))) < TOLERANCE
    assert len(watch.compiled) == 2
    watch.assert_on_devices()
    for sampler in ("uni_pc", "dpmpp_2m", "res_multistep"):
        cell.at("MODEL", "Wan 2.2 14B T2V, both models", sampler)
        assert cell.error(relative_error(run(*pairs, sampler), run(*compiled, sampler))) < TOLERANCE
