"""A program for each model, resolution and batch; none for a seed, a prompt, a sampler or a LoRA."""

import dataclasses

import pytest

from tests.native.models import TABLE, TOLERANCE, compile_model, every_architecture, some_architectures

pytestmark = pytest.mark.comfyui

SCANNED = {
    "Wan 2.1 T2V": {"blocks.0:3"},
    "Wan 2.1 I2V": {"blocks.0:3"},
    "Wan 2.2 14B I2V": {"blocks.0:3"},
    "Wan 2.2 5B": {"blocks.0:3"},
    "Flux.1": {"double_blocks.0:3", "single_blocks.0:3"},
    "Flux.2": {"double_blocks.0:3", "single_blocks.0:3"},
    "HunyuanVideo-1.5": {"double_blocks.0:3"},
    # The first blocks have one more attention than the others, the last has less.
    "SD3.5": {"joint_blocks.0:2"},
    "SDXL": {"middle_block.1.transformer_blocks.0:2"},
    "Qwen-Image": {"transformer_blocks.0:3"},
}


@every_architecture
def test_compilations(architecture, comfyui, watch, cell):
    from tests.native.loras import apply_lora, write_lora
    from tests.native.sampling import sample

    cell.at(TABLE, architecture.name, "programs at one size")
    model = architecture.build(seed=11)
    write_lora(model, comfyui / "models" / "loras" / "counted.safetensors", seed=1)
    compiled = compile_model(model)
    length, other = architecture.tokens
    # Where texts have any length, two prompts hardly ever have the same.
    lengths = {"tokens": length, "negative_tokens": other} if architecture.any_length else {}
    sample(compiled, architecture, steps=2, **lengths)
    assert len(watch.compiled) == 1
    sample(compiled, architecture, steps=3, seed=5, **lengths)
    new_lengths = {"tokens": length + 11, "negative_tokens": length + 3} if architecture.any_length else {}
    sample(compiled, architecture, prompt_seed=6, **new_lengths)
    sample(compiled, architecture, prompt_seed=7)  # both prompts of one length
    sample(compiled, architecture, "uni_pc", cfg=6.0, **lengths)
    for strength in (1.0, 0.4):
        sample(apply_lora(compiled, "counted.safetensors", strength), architecture, steps=2, **lengths)
    sample(compile_model(model), architecture, steps=2, **lengths)  # the node ran again
    assert cell.count(len(watch.compiled)) == 1
    sample(compiled, architecture, steps=2, size=1, **lengths)
    assert len(watch.compiled) == 2, "another resolution"
    sample(compiled, architecture, steps=2, batch=2, **lengths)
    assert len(watch.compiled) == 3, "another batch"
    sample(compiled, architecture, steps=2, **lengths)
    assert len(watch.compiled) == 3, "and back"
    watch.assert_on_devices()


@some_architectures("Wan 2.1 T2V", "Flux.1", "SD3.5", "SDXL", "Qwen-Image", "HunyuanVideo-1.5")
def test_batches_of_other_sizes(architecture, watch):
    """Two programs for 2, 1, 3 and 2 rows: one row is padded to two."""
    from tests.native.sampling import relative_error, sample

    plain = architecture.build(seed=17)
    compiled = compile_model(plain)
    for batch in (2, 1, 3, 2):
        expected = sample(plain, architecture, steps=2, cfg=1.0, batch=batch)
        got = sample(compiled, architecture, steps=2, cfg=1.0, batch=batch)
        assert relative_error(expected, got) < TOLERANCE
    assert len(watch.compiled) == 2
    watch.assert_on_devices()


@some_architectures("SDXL")
def test_regional_prompts(architecture, watch):
    """Three rows for half of the steps, then two: one program, and the same image as from ComfyUI."""
    import nodes
    import torch

    from tests.native.architectures import noise
    from tests.native.sampling import relative_error

    shape = architecture.latents[0]
    mask = torch.zeros(1, *shape[1:])
    mask[..., : shape[-1] // 2] = 1
    everywhere, region, negative = (architecture.prompt(77, seed) for seed in (1, 2, 3))
    region = [[text, {**more, "mask": mask, "mask_strength": 1.0, "end_percent": 0.5}] for text, more in region]
    plain = architecture.build(seed=18)
    results = []
    with torch.inference_mode():
        for model in (plain, compile_model(plain)):
            latent = {"samples": noise(4, 1, *shape)}
            prompts = everywhere + region, negative
            run = nodes.common_ksampler(model, 1, 4, 4.0, "euler", "simple", *prompts, latent)
            results.append(run[0]["samples"])
    assert relative_error(*results) < TOLERANCE
    assert len(watch.compiled) == 1
    watch.assert_on_devices()


@some_architectures("Flux.1", "Flux.2", "SD3.5", "SDXL")
def test_long_prompts(architecture, watch, cell):
    """Longer than what a tokenizer fills up to: one more program, for all of them."""
    from tests.native.sampling import relative_error, sample

    cell.at(TABLE, architecture.name, "long prompts")
    one, other = architecture.longer
    plain = architecture.build(seed=15)
    compiled = compile_model(plain)
    lengths = [{"tokens": one, "negative_tokens": one}, {"tokens": other, "negative_tokens": other}]
    for each in lengths:
        expected = sample(plain, architecture, steps=2, **each)
        assert cell.error(relative_error(expected, sample(compiled, architecture, steps=2, **each))) < TOLERANCE
    assert len(watch.compiled) == 1
    mixed = {"tokens": other, "negative_tokens": architecture.tokens[0]}
    expected = sample(plain, architecture, steps=2, **mixed)
    assert cell.error(relative_error(expected, sample(compiled, architecture, steps=2, **mixed))) < TOLERANCE
    watch.assert_on_devices()


@some_architectures("SDXL")
def test_a_text_as_long_as_an_image(architecture, watch):
    """As many tokens as a level of the network has pixels: filled up further."""
    from tests.native.sampling import relative_error, sample

    wide = dataclasses.replace(architecture, latents=((4, 14, 88), (4, 44, 28)))  # 308 = 7 × 44, 14 × 22
    plain = wide.build(seed=16)
    compiled = compile_model(plain)
    for size in (0, 1):
        expected = sample(plain, wide, steps=1, size=size, tokens=154)
        assert relative_error(expected, sample(compiled, wide, steps=1, size=size, tokens=154)) < TOLERANCE
    watch.assert_on_devices()


@every_architecture
def test_blocks_are_scanned(architecture, monkeypatch):
    """Or a program grows with the number of blocks: 14B in 15 s instead of 3."""
    from comfy_tpu.compiler import uniform
    from tests.native.sampling import sample

    found = {}
    decide = uniform._LoopRecorder.segments

    def deciding(self):
        segments = decide(self)
        found[self._run.path] = len(segments)
        return segments

    monkeypatch.setattr(uniform._LoopRecorder, "segments", deciding)
    sample(compile_model(architecture.build(seed=12)), architecture, steps=1)
    assert {path for path, pieces in found.items() if pieces == 1} >= SCANNED[architecture.name], found


@every_architecture
def test_two_models_of_one_kind(architecture, watch):
    """As Wan 2.2's pair: each has its own weights."""
    from tests.native.models import models
    from tests.native.sampling import relative_error, sample

    one, other = models(architecture), architecture.build(seed=13)
    results = {}
    for name, plain, compiled in (("one", one.plain, one.compiled), ("other", other, compile_model(other))):
        results[name] = sample(plain, architecture, steps=2)
        assert relative_error(results[name], sample(compiled, architecture, steps=2)) < TOLERANCE
    assert relative_error(results["one"], results["other"]) > 10 * TOLERANCE
    watch.assert_on_devices()
