"""Patches of blocks: compiled with the model, or left to ComfyUI where a compiled program would not repeat them."""

import pytest
import torch

from tests.native.models import TOLERANCE, compile_model, models, some_architectures
from tests.native.test_foreign_patches import assert_one_warning, changed, compare

pytestmark = pytest.mark.comfyui


def node(module, name, *args, **kwargs):
    """A stock node as a change of a model."""
    import importlib

    kind = getattr(importlib.import_module(f"comfy_extras.{module}"), name)

    def apply(model):
        result = kind.execute(model, *args, **kwargs)
        return (result.args if hasattr(result, "args") else result)[0]

    return apply


def skip_layers(model, scale=3.0):
    return node("nodes_slg", "SkipLayerGuidanceDiT", scale, 0.0, 1.0, "1", "1")(model)


@some_architectures("Wan 2.1 T2V", "Flux.1", "SD3.5", "Qwen-Image")
def test_skip_layer_guidance(architecture, watch, cell):
    assert compare(architecture, skip_layers, cell, "Skip Layer Guidance") > 10 * TOLERANCE
    watch.assert_on_devices()


@some_architectures("Wan 2.1 T2V")
def test_another_scale_of_skip_layer_guidance_compiles_nothing(architecture, watch):
    """The node runs again, and makes its functions anew: they have the same code and state."""
    from tests.native.sampling import relative_error, sample

    plain = models(architecture).plain
    compiled = compile_model(plain)
    sample(skip_layers(compiled), architecture)
    watch.clear()
    expected = sample(skip_layers(plain, 5.0), architecture)
    assert relative_error(expected, sample(skip_layers(compiled, 5.0), architecture)) < TOLERANCE
    assert watch.compiled == []
    watch.assert_on_devices()


@some_architectures("Wan 2.1 T2V")
def test_blocks_around_a_skipped_one_are_scanned(architecture, monkeypatch, watch):
    import dataclasses

    from comfy_tpu.compiler import uniform
    from tests.native.sampling import relative_error, sample

    found = []
    decide = uniform._LoopRecorder.segments

    def deciding(self):
        found.append([(segment.start, segment.stop) for segment in decide(self)])
        return decide(self)

    monkeypatch.setattr(uniform._LoopRecorder, "segments", deciding)
    deep = dataclasses.replace(architecture, config=architecture.config | {"num_layers": 5})
    plain = deep.build(seed=31)
    change = node("nodes_slg", "SkipLayerGuidanceDiT", 3.0, 0.0, 1.0, "2", "")
    expected = sample(change(plain), deep, steps=1)
    assert relative_error(expected, sample(change(compile_model(plain)), deep, steps=1)) < TOLERANCE
    assert found == [[(0, 5)], [(0, 2), (3, 5)]]
    watch.assert_on_devices()


@some_architectures("SDXL")
def test_perturbed_attention_guidance(architecture, watch, cell):
    change = node("nodes_pag", "PerturbedAttentionGuidance", 3.0)
    assert compare(architecture, change, cell, "Perturbed Attention") > TOLERANCE
    watch.assert_on_devices()


@some_architectures("SDXL")
def test_one_transformer_block_of_several(architecture, watch):
    """The blocks of a transformer are one scan without patches; a patch of one of them is not one of all."""
    from tests.native.sampling import relative_error, sample

    plain = models(architecture).plain

    def change(index):
        return changed(
            lambda model: model.set_model_attn1_replace(lambda q, k, v, options: v * 0.3, "middle", 0, index)
        )

    results = []
    for index in (0, 1):
        expected = sample(change(index)(plain), architecture)
        assert relative_error(expected, sample(change(index)(compile_model(plain)), architecture)) < TOLERANCE
        results.append(expected)
    assert relative_error(*results) > 3 * TOLERANCE
    watch.assert_on_devices()


def by_index(q, k, v, options):
    return q * (1 + options["block_index"]), k, v


def by_mean(emb, channels, options):
    return emb * emb.mean()  # over all rows: of another batch it would be another


def halve(h, options):
    return h * 0.5


@some_architectures("SDXL")
@pytest.mark.parametrize(
    ("kind", "patch"),
    [
        ("attn1_patch", by_index),
        ("attn2_patch", lambda q, k, v, options: (q, k, v * 0.5)),
        ("attn1_output_patch", halve),
        ("attn2_output_patch", halve),
        ("middle_patch", halve),
        ("input_block_patch", halve),
        ("input_block_patch_after_skip", halve),
        ("output_block_patch", lambda h, skip, options: (h, skip * 0.5)),
        ("emb_patch", by_mean),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_kind_of_patch(architecture, watch, cell, kind, patch):
    change = changed(lambda model: model.set_model_patch(patch, kind))
    assert compare(architecture, change, cell, "patches of a U-Net") > 2 * TOLERANCE
    watch.assert_on_devices()


@some_architectures("SDXL")
def test_another_value_in_a_patch_is_another_program(architecture, watch):
    from tests.native.sampling import relative_error, sample

    plain = models(architecture).plain
    compiled = compile_model(plain)

    def change(factor):
        return changed(lambda model: model.set_model_input_block_patch(lambda h, options: h * factor))

    results = []
    for factor in (0.5, 0.7, 0.5):
        expected = sample(change(factor)(plain), architecture)
        assert relative_error(expected, sample(change(factor)(compiled), architecture)) < TOLERANCE
        results.append(expected)
    assert relative_error(*results[:2]) > 10 * TOLERANCE
    assert len(watch.compiled) == 2
    watch.assert_on_devices()


# What stays with ComfyUI.


def reads_sigmas(h, options):
    return h * (0.5 if options["sigmas"][0] > 1 else 2.0)


def asks_for_sigmas(h, options):
    sigmas = options.get("sigmas")
    return h * 0.5 if isinstance(sigmas, torch.Tensor) and float(sigmas.max()) > 1 else h


def catches_the_refusal(h, options):
    try:
        scale = float(options["sigmas"].max())
    except Exception:  # noqa: BLE001 - as patches do
        scale = 1.0
    return h * (0.5 + 0.1 * scale)


def reads_a_value(h, options):
    return h * 0.5 if float(h.mean()) > 0 else h * 0.7


def catches_a_failed_trace(h, options):
    try:
        return h * float(h.mean())
    except Exception:  # noqa: BLE001 - as patches do
        return h


@some_architectures("SDXL")
@pytest.mark.parametrize(
    ("patch", "word"),
    [
        (reads_sigmas, "reads sigmas"),
        (asks_for_sigmas, "reads sigmas"),
        (catches_the_refusal, "reads sigmas"),
        (reads_a_value, "in reads_a_value"),
        (catches_a_failed_trace, "cannot be traced"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_patch_that_depends_on_the_step_or_on_values(architecture, watch, cell, patch, word):
    change = changed(lambda model: model.set_model_input_block_patch(patch))
    assert compare(architecture, change, cell, "patches that read values") > TOLERANCE
    assert_one_warning(watch, word)


@some_architectures("SDXL")
def test_the_attention_is_given_the_same_options(architecture, watch, cell):
    """They are copied into another dictionary for patches of the attention."""

    def patch(q, k, v, options):
        sigmas = options.get("sigmas")
        return q if sigmas is None else q * sigmas[0], k, v

    change = changed(lambda model: model.set_model_attn1_patch(patch))
    assert compare(architecture, change, cell, "patches that read values") > TOLERANCE
    assert_one_warning(watch, "reads sigmas")


@some_architectures("SDXL")
def test_a_patch_that_counts(architecture, watch):
    """Whatever the attempt to trace it did is undone: ComfyUI's own run must count from the same number."""
    from tests.native.sampling import relative_error, sample

    def change(model):
        calls = 0

        def patch(h, options):
            nonlocal calls
            calls += 1
            return h * (1 + 0.01 * calls)

        clone = model.clone()
        clone.set_model_input_block_patch(patch)
        return clone

    plain = models(architecture).plain
    expected = sample(change(plain), architecture)
    assert relative_error(expected, sample(change(compile_model(plain)), architecture)) == 0
    assert watch.calls == []
    assert "keeps something from one call to the next" in watch.warnings[0]
    assert all("changes while the sampler runs" in warning for warning in watch.warnings[1:])


@some_architectures("SDXL")
def test_a_patch_whose_state_another_function_changes(architecture, watch):
    """A counter of steps outside of the model: two programs, and then ComfyUI's own code."""
    from tests.native.sampling import relative_error, sample

    def change(model):
        step = {"now": 0}

        def count(args):
            step["now"] += 1
            return args["denoised"]

        clone = model.clone()
        clone.set_model_input_block_patch(lambda h, options: h * (1 + 0.1 * step["now"]))
        clone.set_model_sampler_post_cfg_function(count)
        return clone

    plain = models(architecture).plain
    expected = sample(change(plain), architecture, steps=4)
    assert relative_error(expected, sample(change(compile_model(plain)), architecture, steps=4)) < TOLERANCE
    assert len(watch.compiled) == 2
    (warning,) = watch.warnings
    assert "changes while the sampler runs" in warning


@some_architectures("SDXL")
@pytest.mark.parametrize(
    ("module", "name", "arguments", "word"),
    [
        ("nodes_sag", "SelfAttentionGuidance", (0.5, 2.0), "reads cond_or_uncond"),
        ("nodes_tomesd", "TomePatchModel", (0.3,), "keeps something from one call to the next"),
    ],
)
def test_stock_nodes_that_stay(architecture, watch, cell, module, name, arguments, word):
    compare(architecture, node(module, name, *arguments), cell, name, steps=2)
    assert word in watch.warnings[0]


@some_architectures("SDXL")
def test_a_patch_with_weights(architecture, watch, cell):
    weight = torch.full((1,), 0.5)
    change = changed(lambda model: model.set_model_input_block_patch(lambda h, options: h * weight))
    assert compare(architecture, change, cell, "patches with tensors") > 10 * TOLERANCE
    assert_one_warning(watch, "holds tensors of its own")
