"""Checkpoints with 8-bit weights and a scale for each layer: ComfyUI undoes that while it computes, and so do we."""

import json

import pytest
import torch

from tests.native.models import TOLERANCE, compile_model, some_architectures

pytestmark = pytest.mark.comfyui


def quantized(state, per_layer):
    """Every linear layer of the blocks in float8, as releases have it."""
    result = dict(state)
    for name, tensor in state.items():
        if name.endswith(".weight") and tensor.ndim == 2 and "block" in name:
            layer = name.removesuffix(".weight")
            scale = tensor.abs().max().float() / 448
            result[name] = (tensor / scale).to(torch.float8_e4m3fn)
            if per_layer:
                result[f"{layer}.weight_scale"] = scale
                described = json.dumps({"format": "float8_e4m3fn"}).encode()
                result[f"{layer}.comfy_quant"] = torch.tensor(list(described), dtype=torch.uint8)
            else:
                result[f"{layer}.scale_weight"] = scale
    if not per_layer:
        result["scaled_fp8"] = torch.empty(0, dtype=torch.float8_e4m3fn)
    return result


@some_architectures("Wan 2.1 T2V", "Wan 2.2 5B")
@pytest.mark.parametrize("per_layer", [True, False], ids=["comfy_quant", "scaled_fp8"])
def test_scaled_fp8(architecture, per_layer, watch):
    import comfy.sd

    from tests.native.sampling import relative_error, sample

    state = quantized(architecture.build(seed=4).model.diffusion_model.state_dict(), per_layer)
    with torch.inference_mode():  # as ComfyUI runs every node
        model = comfy.sd.load_diffusion_model_state_dict(state)
    assert any(hasattr(weight, "_qdata") for weight in model.model.parameters())
    expected = sample(model, architecture)
    exact = sample(architecture.build(seed=4), architecture)
    assert 0.001 < relative_error(exact, expected) < 0.2  # the same model, rounded
    got = sample(compile_model(model), architecture)
    assert relative_error(expected, got) < TOLERANCE
    watch.assert_on_devices()


def as_int8(state, convrot):
    """The same in int8, as ComfyUI 0.33 has it; `convrot`: the columns rotated, a scale for each row."""
    tensors = pytest.importorskip("comfy_kitchen.tensor")
    if not hasattr(tensors, "TensorWiseINT8Layout"):
        pytest.skip("this ComfyUI has no int8 weights")
    rotated = {"convrot": True, "convrot_groupsize": 256} if convrot else {}
    described = torch.tensor(list(json.dumps({"format": "int8_tensorwise", **rotated}).encode()), dtype=torch.uint8)
    result = dict(state)
    for name, tensor in state.items():
        if name.endswith(".weight") and tensor.ndim == 2 and "block" in name:
            layer = name.removesuffix(".weight")
            rounded = tensors.QuantizedTensor.from_float(
                tensor, "TensorWiseINT8Layout", **rotated, **({"per_channel": True} if convrot else {})
            )
            result |= {name: rounded._qdata, f"{layer}.weight_scale": rounded._params.scale}
            result[f"{layer}.comfy_quant"] = described.clone()  # no two may share memory in a file
    return result


@some_architectures("Wan 2.1 T2V")
@pytest.mark.parametrize("kind", ["fp8", "int8", "int8_convrot"])
def test_the_loader_leaves_the_other_layers_as_they_are(architecture, kind, comfyui, watch):
    import comfy.sd
    import comfy.utils

    from comfy_tpu.comfy.native.loading import load_diffusion_model
    from tests.native.sampling import relative_error, sample

    plain = architecture.build(seed=4)
    state = plain.model.diffusion_model.state_dict()
    path = comfyui / "models" / "diffusion_models" / f"{kind}.safetensors"
    quantized_state = quantized(state, per_layer=True) if kind == "fp8" else as_int8(state, kind == "int8_convrot")
    comfy.utils.save_torch_file(quantized_state, str(path))
    with torch.inference_mode():  # as ComfyUI runs every node
        theirs, ours = comfy.sd.load_diffusion_model(str(path)), load_diffusion_model(path)
    exact, expected = sample(plain, architecture), sample(theirs, architecture)
    assert relative_error(expected, sample(ours, architecture)) < 1e-6
    # ComfyUI rounds what int8 weights multiply, and the devices do not.
    rounding = relative_error(exact, expected)
    assert 0.001 < rounding < 0.1
    assert relative_error(exact, sample(compile_model(ours), architecture)) < 1.1 * rounding
    watch.assert_on_devices()
