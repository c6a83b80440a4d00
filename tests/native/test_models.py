"""MODEL: ComfyUI's KSampler gives the same latent with TPU Compile Model in the graph and without it."""

import pytest
import torch

from tests.native.models import (
    DECIBELS,
    TABLE,
    TOLERANCE,
    compare,
    compile_model,
    every_architecture,
    models,
)

pytestmark = pytest.mark.comfyui

SAMPLERS = ("euler", "uni_pc", "dpmpp_2m", "res_multistep")


@every_architecture
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers(architecture, sampler, watch, cell):
    cell.at(TABLE, architecture.name, sampler)
    compare(architecture, cell, sampler)
    watch.assert_on_devices()


@every_architecture
def test_the_comparison_can_fail(architecture):
    """A prompt, a negative prompt and a seed change the latent by more than what is tolerated."""
    from tests.native.sampling import relative_error, sample

    plain = models(architecture).plain
    expected = sample(plain, architecture)
    for changed in ({"prompt_seed": 2}, {"seed": 4}, {"negative_tokens": architecture.tokens[1]}, {"cfg": 3.0}):
        assert relative_error(expected, sample(plain, architecture, **changed)) > 10 * TOLERANCE, changed


@every_architecture
def test_bfloat16(architecture, watch, cell):
    """As ComfyUI in bfloat16, and no further from float32 than that is. Some models lose much in it by themselves."""
    from tests.native.sampling import psnr, sample

    cell.at(TABLE, architecture.name, "bfloat16")
    model = architecture.build(dtype=torch.bfloat16)
    compiled = compile_model(model, precision="bfloat16")
    for sampler in SAMPLERS:
        exact, expected = (sample(each, architecture, sampler) for each in (models(architecture).plain, model))
        got = sample(compiled, architecture, sampler)
        assert cell.decibels(psnr(expected, got)) > DECIBELS, sampler
        assert psnr(exact, got) > min(DECIBELS, psnr(exact, expected) - 3), sampler
        assert got.dtype == torch.float32
    for wrong in ({"prompt_seed": 2}, {"seed": 4}):
        assert psnr(sample(model, architecture), sample(model, architecture, **wrong)) < DECIBELS - 8, wrong
    watch.assert_on_devices()


@every_architecture
def test_a_negative_prompt_of_another_length(architecture, watch, cell):
    cell.at(TABLE, architecture.name, "other negative length")
    compare(architecture, cell, negative_tokens=architecture.tokens[1])
    watch.assert_on_devices()


@every_architecture
def test_a_batch_of_two(architecture, watch, cell):
    cell.at(TABLE, architecture.name, "batch 2")
    one, two = compare(architecture, cell, batch=2)
    assert not torch.equal(one, two)
    watch.assert_on_devices()


@every_architecture
def test_another_resolution(architecture, watch, cell):
    cell.at(TABLE, architecture.name, "second resolution")
    compare(architecture, cell, size=1)
    watch.assert_on_devices()


@every_architecture
def test_without_guidance(architecture, watch, cell):
    """With cfg=1 ComfyUI leaves the negative prompt out."""
    cell.at(TABLE, architecture.name, "cfg 1")
    compare(architecture, cell, cfg=1.0)
    watch.assert_on_devices()


@every_architecture
def test_easycache(architecture, watch, cell):
    from comfy_extras.nodes_easycache import EasyCacheNode

    from tests.native.sampling import relative_error, sample

    cell.at(TABLE, architecture.name, "EasyCache")
    both = models(architecture)
    steps = 6
    cached, compiled = (
        EasyCacheNode.execute(model, reuse_threshold=2.0, start_percent=0.1, end_percent=0.95, verbose=False).args[0]
        for model in (both.plain, both.compiled)
    )
    sample(both.compiled, architecture, steps=1)
    calls_a_step = len(watch.calls)
    watch.clear()
    expected = sample(cached, architecture, steps=steps)
    got = sample(compiled, architecture, steps=steps)
    assert cell.error(relative_error(expected, got)) < TOLERANCE
    watch.assert_on_devices()
    skipped = steps - len(watch.calls) // calls_a_step
    # ComfyUI 0.7 does not ask wrappers in SD3's model: EasyCache changes nothing there.
    assert (1 <= skipped <= steps - 3) or architecture.name == "SD3.5"
