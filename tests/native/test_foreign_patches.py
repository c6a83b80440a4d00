"""What other nodes do to a MODEL: taken along to the devices, or left to ComfyUI with one warning that says why."""

import contextlib
import dataclasses
import functools
import threading

import pytest
import torch

from tests.native.architectures import SeenImage, noise
from tests.native.models import TOLERANCE, compile_model, models, some_architectures

pytestmark = pytest.mark.comfyui

TABLE = "Nodes around the model"


def compare(architecture, change, cell, column, more=None, **options):
    """Samples with a changed model or prompt, without us and with us; how much the change changed."""
    from tests.native.sampling import relative_error, sample

    cell.at(TABLE, column, architecture.name)
    plain = models(architecture).plain
    expected = sample(change(plain), architecture, more=more, **options)
    got = sample(change(compile_model(plain)), architecture, more=more, **options)
    assert cell.error(relative_error(expected, got)) < TOLERANCE
    return relative_error(sample(plain, architecture, **options), expected)


def assert_one_warning(watch, *words):
    assert len(watch.warnings) == 1, watch.warnings
    assert all(word in watch.warnings[0] for word in ("runs without the TPU", *words)), watch.warnings[0]
    assert watch.calls == []


def changed(change):
    """A clone with something done to it, as nodes do."""

    def apply(model):
        clone = model.clone()
        change(clone)
        return clone

    return apply


# What goes to the devices.


class Residuals:
    """A ControlNet that is done: residuals for a model's blocks, which follow the latent."""

    def __init__(self, shapes):
        import comfy.controlnet

        class Control(comfy.controlnet.ControlBase):
            def get_control(self, x_noisy, t, cond, batched_number, transformer_options):
                level = x_noisy.float().square().mean()
                return {
                    place: [
                        None if shape is None else noise(number, len(x_noisy), *shape) * 0.3 * level
                        for number, shape in enumerate(each)
                    ]
                    for place, each in shapes.items()
                }

            def copy(self):
                return self

        self.conditioning = {"control": Control(), "control_apply_to_uncond": True}


RESIDUALS = {
    "SDXL": {
        "input": [],
        "middle": [(128, 4, 4)],
        "output": [(32, 16, 16)] * 3 + [(32, 8, 8), None, (64, 8, 8), (64, 4, 4)] + [(128, 4, 4)] * 2,
    },
    "Flux.1": {"input": [(20, 128), None, (20, 128)], "output": [(20, 128)] * 3},
    "Qwen-Image": {"input": [(20, 256)] * 3},
    "SD3.5": {"output": [(16, 256)] * 4},
}


@some_architectures(*RESIDUALS)
def test_controlnet(architecture, watch, cell):
    control = Residuals(RESIDUALS[architecture.name])
    effect = compare(architecture, lambda model: model, cell, "ControlNet", more=control.conditioning, steps=2)
    assert effect > 10 * TOLERANCE
    watch.assert_on_devices()


@some_architectures("Wan 2.1 T2V", "Flux.1", "SDXL")
def test_wrappers(architecture, watch, cell):
    """Code around the whole model, of any node."""
    from comfy.patcher_extension import WrappersMP

    seen = []

    def around(executor, *args, **kwargs):
        seen.append(1)
        return executor(*args, **kwargs) * 0.9

    change = changed(lambda model: model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "test", around))
    assert compare(architecture, change, cell, "wrappers") > 10 * TOLERANCE
    assert len(seen) == 2 * 3
    watch.assert_on_devices()


@some_architectures("Wan 2.1 T2V", "SDXL")
def test_functions_around_the_guidance(architecture, watch, cell):
    def change(model):
        model.set_model_sampler_cfg_function(lambda args: args["uncond"] + (args["cond"] - args["uncond"]) * 2.5)
        model.set_model_unet_function_wrapper(
            lambda apply, args: apply(args["input"], args["timestep"], **args["c"]) * 1.1
        )

    assert compare(architecture, changed(change), cell, "guidance functions") > 10 * TOLERANCE
    watch.assert_on_devices()


@some_architectures("Wan 2.1 T2V", "SD3.5", "Qwen-Image")
def test_another_noise_schedule(architecture, watch, cell):
    """An object patch of the model's sampling."""
    from comfy_extras.nodes_model_advanced import ModelSamplingSD3

    def change(model):
        return ModelSamplingSD3().patch(model, shift=5.0)[0]

    assert compare(architecture, change, cell, "ModelSampling") > TOLERANCE
    watch.assert_on_devices()


@some_architectures("Wan 2.1 T2V", "SDXL")
def test_an_area_of_the_image(architecture, watch, cell):
    """A prompt for a part of the image has a latent of another size."""
    # Frames, height and width, and then where they begin.
    area = (2, 4, 6, 0, 2, 2) if len(architecture.latents[0]) == 4 else (8, 12, 4, 0)
    compare(architecture, lambda model: model, cell, "areas", more={"area": area, "strength": 0.8}, steps=2)
    watch.assert_on_devices()


@some_architectures("Wan 2.2 5B", "Wan 2.1 T2V", "SDXL")
def test_masked_latents(architecture, watch, cell):
    """Inpainting; and Wan 2.2 5B from an image, where each frame has a time of its own."""
    import nodes

    from tests.native.sampling import relative_error

    cell.at(TABLE, "noise mask", architecture.name)
    shape = architecture.latents[0]
    mask = torch.ones(1, 1, *shape[1:])
    mask[:, :, 0] = 0
    latent = {"samples": noise(4, 1, *shape), "noise_mask": mask}
    prompts = architecture.prompt(20 if shape[0] != 4 else 77, 1), architecture.prompt(20 if shape[0] != 4 else 77, 2)
    results = []
    with torch.inference_mode():
        for model in (models(architecture).plain, models(architecture).compiled):
            results.append(nodes.common_ksampler(model, 1, 3, 4.0, "euler", "simple", *prompts, latent)[0]["samples"])
    assert cell.error(relative_error(*results)) < TOLERANCE
    watch.assert_on_devices()


@some_architectures("Wan 2.1 T2V", "Flux.1")
def test_custom_samplers(architecture, watch, cell):
    """The nodes for which everything is an input of its own."""
    import comfy.samplers
    from comfy_extras import nodes_custom_sampler as nodes

    from tests.native.sampling import relative_error

    cell.at(TABLE, "SamplerCustomAdvanced", architecture.name)
    latent = {"samples": noise(4, 1, *architecture.latents[0])}
    results = []
    with torch.inference_mode():
        for model in (models(architecture).plain, models(architecture).compiled):
            guider = nodes.Guider_DualCFG(model)
            guider.set_conds(*(architecture.prompt(20, seed) for seed in (1, 2, 3)))
            guider.set_cfg(3.0, 2.0)
            sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "beta", 3)
            sampler = comfy.samplers.sampler_object("dpmpp_2m_sde")
            run = nodes.SamplerCustomAdvanced.execute(nodes.Noise_RandomNoise(7), guider, sampler, sigmas, latent)
            results.append(run.args[0]["samples"])
    assert cell.error(relative_error(*results)) < TOLERANCE
    watch.assert_on_devices()


@some_architectures("Flux.1", "Qwen-Image", "Flux.2")
def test_reference_images(architecture, watch, cell):
    """Kontext and its like: images to work from, as further latents."""
    latents = [noise(8, 1, *architecture.latents[0]), noise(9, 1, *architecture.latents[1])]
    more = {"reference_latents": latents}
    assert compare(architecture, lambda model: model, cell, "reference latents", more=more, steps=2) > 10 * TOLERANCE
    watch.assert_on_devices()


@some_architectures("HunyuanVideo-1.5")
def test_a_mask_over_the_text(architecture, watch, cell):
    mask = torch.ones(1, architecture.tokens[0], dtype=torch.long)
    mask[:, -6:] = 0
    # ComfyUI 0.7 has no mask for both texts together, nor for a batch.
    more = {"attention_mask": mask, "conditioning_byt5small": None}
    assert compare(architecture, lambda model: model, cell, "masked text", more=more, steps=2, cfg=1.0) > TOLERANCE
    watch.assert_on_devices()


@some_architectures("HunyuanVideo-1.5")
def test_an_image_as_clip_vision_sees_it(architecture, watch, cell):
    more = {"clip_vision_output": SeenImage(), "concat_latent_image": noise(7, 1, *architecture.latents[0])}
    assert compare(architecture, lambda model: model, cell, "CLIP Vision", more=more, steps=2) > TOLERANCE
    watch.assert_on_devices()


# What stays with ComfyUI.


@some_architectures("Wan 2.1 T2V", "Flux.1", "SD3.5", "Qwen-Image", "HunyuanVideo-1.5")
def test_a_replaced_block(architecture, watch, cell):
    def replace(args, extra):
        out = extra["original_block"](args)
        return {name: value * 0.8 for name, value in out.items()}

    change = changed(lambda model: model.set_model_patch_replace(replace, "dit", "double_block", 1))
    assert compare(architecture, change, cell, "replaced block") > 10 * TOLERANCE
    watch.assert_on_devices()


@some_architectures("SDXL")
def test_a_replaced_attention(architecture, watch, cell):
    def replace(q, k, v, options):
        return v * 0.5 if q.shape == v.shape else q * 0.5

    change = changed(lambda model: model.set_model_attn1_replace(replace, "middle", 0))
    assert compare(architecture, change, cell, "replaced attention") > TOLERANCE
    watch.assert_on_devices()


@some_architectures("SDXL")
def test_free_u(architecture, watch, cell):
    """A patch between two blocks."""
    from comfy_extras.nodes_freelunch import FreeU_V2

    def change(model):
        result = FreeU_V2.execute(model, 1.3, 1.4, 0.9, 0.2) if hasattr(FreeU_V2, "execute") else None
        return result.args[0] if result is not None else FreeU_V2().patch(model, 1.3, 1.4, 0.9, 0.2)[0]

    assert compare(architecture, change, cell, "FreeU") > 10 * TOLERANCE
    watch.assert_on_devices()


@some_architectures("Wan 2.1 T2V", "SDXL")
def test_code_among_the_options(architecture, watch, cell):
    def change(model):
        model.model_options["transformer_options"]["my_option"] = lambda x: x

    compare(architecture, changed(change), cell, "callable option")
    assert_one_warning(watch, "my_option")


@some_architectures("Wan 2.1 T2V", "Flux.1")
def test_another_attention(architecture, watch, cell):
    """A node that brings its own attention means it."""
    used = []

    def attend(original, *args, **kwargs):
        used.append(1)
        return original(*args, **kwargs) * 0.7

    def change(model):
        model.model_options["transformer_options"]["optimized_attention_override"] = attend

    assert compare(architecture, changed(change), cell, "attention override") > 10 * TOLERANCE
    assert_one_warning(watch, "optimized_attention_override")


@some_architectures("Wan 2.1 T2V", "Flux.1")
def test_weights_that_are_hooked_to_a_prompt(architecture, comfyui, watch, cell):
    import comfy.hooks
    import comfy.utils

    from tests.native.loras import write_lora

    path = comfyui / "models" / "loras" / "hooked.safetensors"
    write_lora(models(architecture).plain, path, seed=3)
    hooks = comfy.hooks.create_hook_lora(comfy.utils.load_torch_file(str(path)), 1.0, 0.0)
    more = {"hooks": hooks}
    assert compare(architecture, lambda model: model, cell, "hooks", more=more) > 10 * TOLERANCE
    assert_one_warning(watch, "hooked")


@some_architectures("Wan 2.1 T2V")
def test_a_replaced_part_of_the_model(architecture, watch, cell):
    class Halved(torch.nn.Module):
        def __init__(self, part):
            super().__init__()
            self.part = part

        def forward(self, x):
            return self.part(x) * 0.5

    def change(model):
        part = Halved(model.get_model_object("diffusion_model.time_embedding"))
        model.add_object_patch("diffusion_model.time_embedding", part)

    assert compare(architecture, changed(change), cell, "object patches") > 10 * TOLERANCE
    assert_one_warning(watch, "diffusion_model.time_embedding")


@some_architectures("Wan 2.1 T2V", "SDXL")
def test_injected_code(architecture, watch, cell):
    """As AnimateDiff does: a block is changed while the model is sampled, and put back afterwards."""
    from comfy.patcher_extension import PatcherInjection

    def inject(patcher):
        part = patcher.model.diffusion_model.get_submodule(FIRST_BLOCK[architecture.name])
        part.forward = lambda *args, **kwargs: type(part).forward(part, *args, **kwargs) * 0.5

    def eject(patcher):
        del patcher.model.diffusion_model.get_submodule(FIRST_BLOCK[architecture.name]).forward

    change = changed(lambda model: model.set_injections("mine", [PatcherInjection(inject, eject)]))
    assert compare(architecture, change, cell, "injections") > 10 * TOLERANCE
    assert_one_warning(watch, "injects code", "mine")


FIRST_BLOCK = {"Wan 2.1 T2V": "blocks.0", "SDXL": "middle_block.0"}


@contextlib.contextmanager
def forward_replaced(part):
    part.forward = lambda *args, **kwargs: type(part).forward(part, *args, **kwargs) * 0.5
    yield
    del part.forward


@contextlib.contextmanager
def hook(part):
    handle = part.register_forward_hook(lambda module, inputs, out: out * 0.5)
    yield
    handle.remove()


@contextlib.contextmanager
def hook_before(part):
    handle = part.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5, *inputs[1:]))
    yield
    handle.remove()


@contextlib.contextmanager
def another_class(part):
    kind = type(part)
    part.__class__ = type("Halved", (kind,), {"forward": lambda self, *a, **k: kind.forward(self, *a, **k) * 0.5})
    yield
    part.__class__ = kind


@some_architectures("Wan 2.1 T2V", "SDXL")
@pytest.mark.parametrize(
    ("deed", "word"),
    [
        (forward_replaced, "replaced"),
        (hook, "hook"),
        (hook_before, "hook"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_code_put_on_the_module_itself(architecture, watch, cell, deed, word):
    """What some custom nodes do, with no word to ComfyUI; and the model goes back to the devices afterwards."""
    from tests.native.sampling import relative_error, sample

    cell.at(TABLE, "monkey patches", architecture.name)
    plain = models(architecture).plain
    compiled = compile_model(plain)
    before = sample(compiled, architecture)
    watch.clear()
    with deed(plain.model.diffusion_model.get_submodule(FIRST_BLOCK[architecture.name])):
        expected = sample(plain, architecture)
        got = sample(compiled, architecture)
    assert relative_error(before, expected) > 10 * TOLERANCE
    assert cell.error(relative_error(expected, got)) < TOLERANCE
    assert_one_warning(watch, word)
    assert torch.equal(sample(compiled, architecture), before)
    assert watch.calls


@contextlib.contextmanager
def other_epsilon(part):
    norms = [each for each in part.modules() if isinstance(each, (torch.nn.LayerNorm, torch.nn.GroupNorm))]
    before = [norm.eps for norm in norms]
    for norm in norms:
        norm.eps = 0.5
    yield
    for norm, eps in zip(norms, before, strict=True):
        norm.eps = eps


@contextlib.contextmanager
def no_bias(part):
    linears = [each for each in part.modules() if isinstance(each, torch.nn.Linear) and each.bias is not None]
    before = [linear.bias for linear in linears]
    for linear in linears:
        linear.bias = None
    yield
    for linear, bias in zip(linears, before, strict=True):
        linear.bias = bias


@contextlib.contextmanager
def weights_written(part):
    weight = next(each.weight for each in part.modules() if isinstance(each, torch.nn.Linear))
    before = weight.data.clone()
    weight.data.mul_(0.2)
    yield
    weight.data.copy_(before)


@contextlib.contextmanager
def method_of_the_class(part):
    kind, forward = type(part), type(part).forward
    kind.forward = lambda self, *args, **kwargs: forward(self, *args, **kwargs) * 0.5
    yield
    kind.forward = forward


DEEDS = [another_class, method_of_the_class, other_epsilon, no_bias, weights_written]


@some_architectures("Wan 2.1 T2V", "SDXL")
@pytest.mark.parametrize("deed", DEEDS, ids=lambda deed: deed.__name__)
def test_a_module_made_of_something_else(architecture, watch, deed):
    """It is another program, or has other weights; and back again."""
    from tests.native.sampling import relative_error, sample

    plain = architecture.build(seed=23)
    compiled = compile_model(plain)
    before = sample(compiled, architecture)
    with deed(plain.model.diffusion_model.get_submodule(FIRST_BLOCK[architecture.name])):
        expected = sample(plain, architecture)
        got = sample(compiled, architecture)
    assert relative_error(before, expected) > 2 * TOLERANCE
    assert relative_error(expected, got) < TOLERANCE
    assert relative_error(before, sample(compiled, architecture)) < 1e-6
    watch.assert_on_devices()


@some_architectures("Wan 2.1 T2V")
def test_a_module_that_is_changed_at_every_run(architecture, watch):
    """Is right, compiles each time, and does not fill the devices."""
    from comfy_tpu.compiler.residency import shared_residency
    from tests.native.sampling import relative_error, sample

    shared_residency().clear()
    plain = architecture.build(seed=29)
    compiled = compile_model(plain)
    norm = plain.model.diffusion_model.blocks[0].norm1
    held = []
    for eps in (0.1, 0.2, 0.3, 0.4, 0.5):
        norm.eps = eps
        expected = sample(plain, architecture, steps=1)
        assert relative_error(expected, sample(compiled, architecture, steps=1)) < TOLERANCE
        held.append(max(shared_residency().bytes_per_device().values()))
    assert len(watch.compiled) == 5
    assert held[2:] == [3 * held[0]] * 3
    watch.assert_on_devices()


@some_architectures("Wan 2.1 T2V")
def test_another_model_in_its_place(architecture, watch):
    from tests.native.sampling import relative_error, sample

    plain, other = architecture.build(seed=24), architecture.build(seed=25)
    compiled = compile_model(plain)
    sample(compiled, architecture, steps=1)
    plain.model.diffusion_model = other.model.diffusion_model
    expected = sample(other, architecture, steps=1)
    assert relative_error(expected, sample(compiled, architecture, steps=1)) < TOLERANCE


@some_architectures("Wan 2.1 T2V")
def test_a_patch_of_the_whole_model(architecture, watch):
    """Ours beside it would leave something behind when both are taken off."""
    from tests.native.sampling import sample

    plain, other = architecture.build(seed=26), architecture.build(seed=27)
    before = sample(plain, architecture, steps=1)
    patched = changed(lambda model: model.add_object_patch("diffusion_model", other.model.diffusion_model))(plain)
    expected = sample(patched, architecture, steps=1)
    assert torch.equal(sample(compile_model(patched), architecture, steps=1), expected)
    assert_one_warning(watch, "another node replaced diffusion_model")
    assert torch.equal(sample(plain, architecture, steps=1), before)


@some_architectures("Wan 2.1 T2V")
def test_a_module_that_cannot_be_copied(architecture, watch):
    from tests.native.sampling import sample

    plain = architecture.build(seed=28)
    plain.model.diffusion_model.lock = threading.Lock()
    expected = sample(plain, architecture, steps=1)
    assert torch.equal(sample(compile_model(plain), architecture, steps=1), expected)
    assert_one_warning(watch, "cannot be copied")


@some_architectures("Wan 2.1 T2V")
def test_a_tensor_among_the_options(architecture, watch, cell):
    def change(model):
        model.model_options["transformer_options"]["my_tensor"] = torch.zeros(2)

    compare(architecture, changed(change), cell, "tensor option")
    assert_one_warning(watch, "my_tensor")


@some_architectures("Qwen-Image")
def test_a_wrapper_that_runs_prompts_by_itself(architecture, watch, cell):
    def one_by_one(apply, args):
        parts = zip(args["input"].split(1), args["timestep"].split(1), strict=True)
        texts = args["c"]["c_crossattn"].split(1)
        return torch.cat(
            [apply(x, t, **{**args["c"], "c_crossattn": text}) for (x, t), text in zip(parts, texts, strict=True)]
        )

    change = changed(lambda model: model.set_model_unet_function_wrapper(one_by_one))
    compare(architecture, change, cell, "prompts one by one")
    watch.assert_on_devices()


@some_architectures("Wan 2.1 T2V")
def test_a_patch_that_was_taken_off(architecture, watch):
    """ComfyUI leaves the method that was there before on the object, where it hides the class's."""
    from tests.native.sampling import sample

    plain = models(architecture).plain
    name = f"diffusion_model.{FIRST_BLOCK[architecture.name]}.forward"
    patched = changed(lambda model: model.add_object_patch(name, model.get_model_object(name)))(plain)
    sample(patched, architecture, steps=1)
    sample(plain, architecture, steps=1)
    part = plain.model.diffusion_model.get_submodule(FIRST_BLOCK[architecture.name])
    assert "forward" in vars(part)
    sample(compile_model(plain), architecture, steps=1)
    watch.assert_on_devices()


@some_architectures("Wan 2.1 T2V", "SDXL")
def test_weights_that_are_computed_while_the_model_runs(architecture, watch, cell):
    def change(model):
        key = next(key for key in model.model_state_dict() if key.endswith(".weight") and "norm" not in key)
        model.add_weight_wrapper(key, lambda weight: weight * 0.3)

    assert compare(architecture, changed(change), cell, "weight wrappers") > TOLERANCE
    assert_one_warning(watch, "computes the weights of")


@some_architectures("Wan 2.1 T2V", "SDXL")
@pytest.mark.parametrize("order", ["before", "behind"])
def test_torch_compile(architecture, watch, cell, order):
    """ComfyUI's Torch Compile node beside ours has nothing left to compile."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    cell.at(TABLE, "Torch Compile", architecture.name)
    compiling = changed(lambda model: set_torch_compile_wrapper(model, backend="eager"))
    plain = models(architecture).plain
    both = compile_model(compiling(plain)) if order == "before" else compiling(compile_model(plain))
    from tests.native.sampling import relative_error, sample

    assert cell.error(relative_error(sample(plain, architecture), sample(both, architecture))) < TOLERANCE
    watch.assert_on_devices()


@some_architectures("Wan 2.1 T2V")
def test_context_windows(architecture, watch, cell):
    """A long video in pieces that overlap: the sampler cuts it, the model sees one piece after the other."""
    from comfy_extras.nodes_context_windows import WanContextWindowsManualNode

    def change(model):
        return WanContextWindowsManualNode.execute(model, 5, 0, "standard_static", 1, False, "pyramid", False).args[0]

    compare(architecture, change, cell, "context windows")
    watch.assert_on_devices()


@some_architectures("HunyuanVideo-1.5")
def test_a_model_that_reads_the_sampler(architecture, watch, cell):
    """A distilled one looks for its step among the sampler's, by value: nothing that can be compiled."""
    from tests.native.sampling import relative_error, sample

    cell.at(TABLE, "distilled (meanflow)", architecture.name)
    distilled = dataclasses.replace(architecture, config=architecture.config | {"meanflow": True})
    plain = distilled.build()
    expected = sample(plain, distilled)
    got = sample(compile_model(plain), distilled)
    assert cell.error(relative_error(expected, got)) < TOLERANCE
    assert_one_warning(watch, "sigmas")


@some_architectures("Wan 2.1 T2V")
@pytest.mark.parametrize("trouble", [KeyError("my key"), TypeError("my type"), RuntimeError("my sizes")])
def test_a_model_that_fails_only_while_it_is_traced(architecture, watch, monkeypatch, trouble):
    """Whatever a trace raises, ComfyUI's own code may still run."""
    from tests.native.sampling import relative_error, sample

    plain = architecture.build(seed=21)
    module = type(plain.model.diffusion_model)
    forward = module._forward

    @functools.wraps(forward)
    def fragile(self, x, *args, **kwargs):
        if type(x) is not torch.Tensor:
            raise trouble
        return forward(self, x, *args, **kwargs)

    expected = sample(plain, architecture)
    monkeypatch.setattr(module, "_forward", fragile)
    assert relative_error(expected, sample(compile_model(plain), architecture)) < TOLERANCE
    assert_one_warning(watch, str(trouble.args[0]))


@some_architectures("Wan 2.1 T2V")
def test_each_reason_is_said_once(architecture, watch):
    """And the model goes back to the devices when the reason is gone."""
    from tests.native.sampling import sample

    compiled = compile_model(models(architecture).plain)
    patched = changed(lambda model: model.model_options["transformer_options"].update(my_option=lambda value: value))(
        compiled
    )
    for seed in (1, 2):
        sample(patched, architecture, seed=seed)
    assert_one_warning(watch, "my_option")
    sample(compiled, architecture)
    assert len(watch.calls) == 3
