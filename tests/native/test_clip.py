"""CLIP: the same conditioning with TPU Compile CLIP in the graph and without it."""

import codecs
import functools
import types

import pytest
import torch

from tests.native.texts import TEXTS

pytestmark = pytest.mark.comfyui

TABLE = "CLIP"
TOLERANCE = 1e-3
DECIBELS = 43
"""In bfloat16, where 46 and more are found."""
PROMPT = 'a red circle moving right on a black background, the words "TPU" below it'

every_text = pytest.mark.parametrize(
    "small",
    [pytest.param(each, marks=pytest.mark.xdist_group(f"CLIP {each.name}")) for each in TEXTS],
    ids=lambda each: each.name.replace(" ", "_"),
)


@functools.cache
def clips(small):
    plain = small.build()
    return types.SimpleNamespace(plain=plain, compiled=compile_clip(plain))


@pytest.fixture(autouse=True, scope="module")
def _nothing_left(comfyui):
    yield
    clips.cache_clear()


def compile_clip(clip, *, mesh="single", precision="float32", attention="auto"):
    from comfy_tpu.comfy.compile_nodes import TPUCompileCLIP

    return TPUCompileCLIP.execute(clip, mesh=mesh, precision=precision, attention=attention).args[0]


def encode(clip, text=PROMPT):
    """Everything that CLIP Text Encode says, by name."""
    import nodes

    with torch.inference_mode():
        ((features, extra),) = nodes.CLIPTextEncode().encode(clip, text)[0]
    return {"features": features, **{name: value for name, value in extra.items() if torch.is_tensor(value)}}


def error(expected, got):
    from tests.native.sampling import relative_error

    assert list(expected) == list(got)
    return max(relative_error(expected[name], got[name]) for name in expected)


def apart(one, other):
    """How different two texts are, whatever their lengths."""
    length = min(one["features"].shape[1], other["features"].shape[1])
    return float((one["features"][:, :length] - other["features"][:, :length]).abs().max())


@every_text
def test_prompt(small, watch, cell):
    cell.at(TABLE, small.name, "prompt")
    both = clips(small)
    expected = encode(both.plain)
    assert apart(expected, encode(both.plain, "a blue square at night")) > 1e-2
    assert cell.error(error(expected, encode(both.compiled))) < TOLERANCE
    watch.assert_on_devices()


@every_text
def test_empty_prompt(small, watch, cell):
    cell.at(TABLE, small.name, "empty prompt")
    both = clips(small)
    assert cell.error(error(encode(both.plain, ""), encode(both.compiled, ""))) < TOLERANCE
    watch.assert_on_devices()


@every_text
def test_weighted_words(small, watch, cell):
    cell.at(TABLE, small.name, "weighted words")
    both, text = clips(small), "a (red circle:1.4) moving (right:0.6)"
    expected = encode(both.plain, text)
    if small.has_weights:
        assert apart(expected, encode(both.plain, "a red circle moving right")) > 1e-3
    assert cell.error(error(expected, encode(both.compiled, text))) < TOLERANCE
    watch.assert_on_devices()


@every_text
def test_long_prompt(small, watch, cell):
    """Longer than one section of a CLIP, and than a bucket."""
    cell.at(TABLE, small.name, "long prompt")
    both, text = clips(small), ", ".join([PROMPT] * 14)
    expected = encode(both.plain, text)
    assert expected["features"].shape[1] > (77 if small.name in ("SD 1.5", "SDXL") else 256)
    assert cell.error(error(expected, encode(both.compiled, text))) < TOLERANCE
    watch.assert_on_devices()


@every_text
def test_clip_skip(small, watch, cell):
    import nodes

    cell.at(TABLE, small.name, "clip skip 2")
    plain, compiled = (
        nodes.CLIPSetLastLayer().set_last_layer(clip, -2)[0] for clip in (clips(small).plain, clips(small).compiled)
    )
    assert cell.error(error(encode(plain), encode(compiled))) < TOLERANCE
    watch.assert_on_devices()


@every_text
def test_lora(small, comfyui, watch, cell):
    """At three strengths and without it again: each as without us, and nothing compiled."""
    from tests.native.loras import apply_text_lora, write_text_lora

    cell.at(TABLE, small.name, "LoRA")
    both, name = clips(small), f"text {small.name}.safetensors"
    path = comfyui / "models" / "loras" / name
    write_text_lora(both.plain, path, seed=5)
    try:
        bare = encode(both.plain)
        encode(both.compiled)
        watch.clear()
        for strength in (0.3, 1.0, -0.5):
            expected = encode(apply_text_lora(both.plain, name, strength))
            assert apart(bare, expected) > 1e-2
            assert cell.error(error(expected, encode(apply_text_lora(both.compiled, name, strength)))) < TOLERANCE
        assert error(bare, encode(both.compiled)) < TOLERANCE
    finally:
        path.unlink()
    watch.assert_on_devices()
    assert watch.compiled == []


@every_text
def test_bfloat16(small, watch, cell):
    from tests.native.sampling import psnr

    cell.at(TABLE, small.name, "bfloat16")
    plain = clips(small).plain
    expected, got = encode(plain), encode(compile_clip(plain, precision="bfloat16"))
    for name in expected:
        assert got[name].dtype == expected[name].dtype
        if expected[name].is_floating_point():
            assert cell.decibels(psnr(expected[name], got[name])) > DECIBELS
    other = encode(plain, codecs.encode(PROMPT, "rot13"))["features"]
    is_longer = other.shape != expected["features"].shape
    assert is_longer or psnr(expected["features"], other) < DECIBELS - 8, "another prompt would be seen"
    watch.assert_on_devices()


@every_text
def test_eight_devices(small, watch, cell, eight_devices):
    cell.at(TABLE, small.name, "8 devices")
    plain = clips(small).plain
    assert cell.error(error(encode(plain), encode(compile_clip(plain, mesh="auto")))) < TOLERANCE
    watch.assert_on_devices()


@every_text
def test_compilations(small, watch, cell):
    """Another prompt is no new program, nor are words with weights."""
    cell.at(TABLE, small.name, "programs")
    compiled = compile_clip(small.build(seed=1))
    encode(compiled)
    cell.count(len(watch.compiled))
    watch.compiled.clear()
    encode(compiled, PROMPT.replace("red circle", "(big square:1.2)").replace("TPU", "Wan 2.1"))
    encode(compiled)
    assert watch.compiled == []


@every_text
def test_long_prompts_are_one_program(small, watch):
    compiled = compile_clip(small.build(seed=4))
    words = ", ".join([PROMPT] * 14)
    encode(compiled, words)
    watch.compiled.clear()
    encode(compiled, f"{words}, at night")
    assert watch.compiled == []
    assert not watch.warnings


def some_texts(*names):
    chosen = [each for each in TEXTS if each.name in names]
    assert len(chosen) == len(names)
    return pytest.mark.parametrize("small", chosen, ids=lambda each: each.name.replace(" ", "_"))


@some_texts("SD 1.5", "Wan 2.1, Wan 2.2")
@pytest.mark.parametrize("scheduled", [False, True], ids=["at once", "scheduled"])
def test_hooked_weights(small, scheduled, comfyui, watch):
    """Set CLIP Hooks: ComfyUI writes into the weights and back again, in a way that leaves no trace."""
    import comfy.hooks
    import comfy.utils
    from comfy_extras.nodes_hooks import SetClipHooks

    from tests.native.loras import write_text_lora

    plain = clips(small).plain
    path = comfyui / "models" / "loras" / "hooked text.safetensors"
    write_text_lora(plain, path, seed=8)
    hooks = comfy.hooks.create_hook_lora(comfy.utils.load_torch_file(str(path)), 0.0, 1.0)
    path.unlink()
    compiled = compile_clip(plain)
    bare = encode(compiled)
    watch.clear()
    hooked = [SetClipHooks().apply_hooks(clip, scheduled, False, hooks)[0] for clip in (plain, compiled)]
    expected = encode(hooked[0])
    assert apart(bare, expected) > 1e-2
    assert error(expected, encode(hooked[1])) < TOLERANCE
    assert "runs without the TPU" in watch.warnings[0]
    assert "hooked" in watch.warnings[0]
    assert error(bare, encode(compiled)) < 1e-6
    assert watch.calls


@some_texts("SD 1.5", "Qwen-Image")
def test_a_replaced_method(small, watch):
    plain = clips(small).plain
    compiled = compile_clip(plain)
    part = next(part for name, part in plain.cond_stage_model.named_modules() if name.endswith("mlp"))
    part.forward = lambda x: type(part).forward(part, x) * 0.5
    try:
        expected, got = encode(plain), encode(compiled)
    finally:
        del part.forward
    assert apart(expected, encode(compiled)) > 1e-2
    assert error(expected, got) < TOLERANCE
    assert "replaced" in watch.warnings[0]


@some_texts("Qwen-Image")
def test_a_prompt_with_an_image(small, watch):
    """Qwen Image Edit: positions depend on the image. The prompts after it go to the devices as before."""
    from comfy_extras.nodes_qwen import TextEncodeQwenImageEdit

    both = clips(small)
    compiled = compile_clip(both.plain)
    image = torch.rand(1, 56, 56, 3, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected, got = (
            TextEncodeQwenImageEdit.execute(clip, "make it blue", image=image).args[0][0][0]
            for clip in (both.plain, compiled)
        )
    assert float((expected - got).abs().max() / expected.abs().max()) < TOLERANCE
    watch.clear()
    assert error(encode(both.plain), encode(compiled)) < TOLERANCE
    watch.assert_on_devices()


@every_text
def test_without_the_node_again(small):
    clip = small.build(seed=2)
    before, patches = encode(clip), dict(clip.patcher.object_patches)
    compiled = compile_clip(clip)
    encode(compiled)
    after = encode(clip)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert compiled is not clip
    assert clip.patcher.object_patches == patches


@some_texts("Wan 2.1, Wan 2.2")
def test_a_known_text_encoder_is_split_by_its_familys_table(small, watch, eight_devices):
    from comfy_tpu.comfy.native.hosting import _hosts
    from comfy_tpu.families.wan.text import TEXT_ENCODER

    plain = clips(small).plain
    assert error(encode(plain), encode(compile_clip(plain, mesh="seed"))) < TOLERANCE
    (module,) = [part for part in plain.cond_stage_model.modules() if type(part).__name__ == "T5"]
    tables = {choices.mesh: host._hosted._component.spec.rules for (choices, _), host in _hosts[module].items()}
    assert tables["seed"] == TEXT_ENCODER.rules
    watch.assert_on_devices()
