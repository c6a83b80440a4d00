"""Models beyond those of the table, and models that cannot run on the devices: the same result as without our node."""

import dataclasses

import pytest

from tests.native.architectures import HUNYUAN_IMAGE, LTX2, MINIMAX_H3, noise
from tests.native.models import TOLERANCE, compile_model, models

pytestmark = pytest.mark.comfyui


@pytest.mark.parametrize("seed", [1, 2], ids=["words to be drawn", "no words to be drawn"])
def test_hunyuan_image(seed, watch):
    from tests.native.sampling import relative_error, sample

    both = models(HUNYUAN_IMAGE)
    expected, got = (sample(each, HUNYUAN_IMAGE, prompt_seed=seed) for each in (both.plain, both.compiled))
    assert relative_error(expected, got) < TOLERANCE
    watch.assert_on_devices()


def _first_frame(**shape):
    """The noise mask of a video whose first frame is given: all of it, or its upper half."""
    import torch

    mask = torch.ones(1, 1, 3, shape.get("rows", 1), shape.get("columns", 1))
    mask[:, :, 0, : (mask.shape[3] + 1) // 2] = 0
    return mask


@pytest.mark.parametrize(
    "mask",
    [None, {}, {"rows": 4, "columns": 6}],
    ids=["text to video", "image to video", "inpainting"],
)
def test_video_with_sound(mask, watch):
    """LTX-2 is given a list, the video and its sound; ComfyUI 0.33 has it."""
    import comfy.supported_models
    import torch

    if not hasattr(comfy.supported_models, LTX2.model_class):
        pytest.skip("this ComfyUI has no LTX-2")
    from comfy.nested_tensor import NestedTensor

    from tests.native.sampling import relative_error, sample

    both = models(LTX2)
    latent = {"samples": NestedTensor([noise(9, 1, 128, 3, 4, 6) * 0.1, noise(8, 1, 8, 9, 16) * 0.1])}
    if mask is not None:
        latent["noise_mask"] = NestedTensor([_first_frame(**mask), torch.ones(1, 1, 9, 16)])
    expected, got = (sample(each, LTX2, latent=latent) for each in (both.plain, both.compiled))
    for each in zip(expected.tensors, got.tensors, strict=True):
        assert relative_error(*each) < TOLERANCE
    watch.assert_on_devices()


def _sample_minimax(architecture, more, shifts=None):
    """With our node and without it: the relative errors of the video and its sound."""
    import comfy.supported_models

    if not hasattr(comfy.supported_models, architecture.model_class):
        pytest.skip("this ComfyUI has no MiniMax H3")
    from comfy.nested_tensor import NestedTensor

    from tests.native.sampling import relative_error, sample

    both = models(architecture)
    for each in (both.plain, both.compiled):
        each.model_options["transformer_options"] = dict(shifts or {})
    latent = {"samples": NestedTensor([noise(9, 1, 24, 3, 4, 6) * 0.1, noise(8, 1, 32, 2, 9) * 0.1])}
    expected, got = (sample(each, architecture, latent=latent, more=more) for each in (both.plain, both.compiled))
    return [relative_error(*each) for each in zip(expected.tensors, got.tensors, strict=True)]


CURVE = dataclasses.replace(MINIMAX_H3, config={**MINIMAX_H3.config, "adaln_curve_grid": 32})


SHIFTS = {"minimax_h3_sigma_shift_video": 8.0, "minimax_h3_sigma_shift_audio": 2.0}


@pytest.mark.parametrize(
    ("architecture", "tags", "shifts"),
    [(MINIMAX_H3, None, SHIFTS), (CURVE, None, None), (CURVE, [1, 1, 0, 0, 0] * 4, None)],
    ids=["embedded times", "curve of times", "prompt with an image"],
)
def test_minimax_h3(architecture, tags, shifts, watch):
    """The model reads each step's times as numbers."""
    import torch

    more = {} if tags is None else {"minimax_token_tags": torch.tensor(tags)}
    assert max(_sample_minimax(architecture, more, shifts)) < TOLERANCE
    watch.assert_on_devices()


def test_minimax_h3_with_a_first_frame_runs_without_us(watch):
    keyframes = [{"resolved_frame_index": 0, "latent": noise(5, 1, 24, 1, 4, 6)}]
    assert _sample_minimax(MINIMAX_H3, {"minimax_keyframes": keyframes}) == [0, 0]
    assert "MiniMax H3 draws noise for its keyframes" in watch.warnings[0]


@pytest.fixture
def broken(monkeypatch):
    """A model that our code fails on, in a way that nobody thought of."""
    from comfy_tpu.comfy.native.model import DeviceForward

    def fail(self, host, *args, **kwargs):
        raise AttributeError("'list' object has no attribute 'shape'")

    monkeypatch.setattr(DeviceForward, "_run_on_devices", fail)
    return HUNYUAN_IMAGE


def test_an_unforeseen_error_leaves_the_model_to_comfyui(broken, watch):
    import torch

    from comfy_tpu.comfy.status import STATUS
    from tests.native.sampling import sample

    plain = broken.build()
    assert torch.equal(sample(plain, broken), sample(compile_model(plain), broken))
    reason = "AttributeError: 'list' object has no attribute 'shape'"
    assert watch.warnings == [f"HunyuanVideo runs without the TPU: {reason}"]
    assert reason in [entry["reason"] for entry in STATUS.fallbacks.as_list()]


def test_a_large_model_does_not_run_on_the_cpu_unasked(broken, monkeypatch):
    from comfy_tpu.comfy.native import replacement
    from comfy_tpu.comfy.native.hosting import Choices
    from comfy_tpu.comfy.native.model import compile_model as compile_with
    from comfy_tpu.errors import UnsupportedError
    from tests.native.sampling import sample

    monkeypatch.setattr(replacement, "LARGE", 1000)
    plain = broken.build()
    with pytest.raises(
        UnsupportedError, match="no attribute 'shape'.*minutes for each prompt or step.*cpu_fallback in TPU Options"
    ):
        sample(compile_model(plain), broken, steps=1)
    sample(compile_with(plain, Choices("single", cpu_fallback=True)), broken, steps=1)
    monkeypatch.setenv("COMFY_TPU_CPU_FALLBACK", "1")
    sample(compile_model(plain), broken, steps=1)
