"""A model that another node changes between two steps: code and weights are looked at while the devices compute."""

import contextlib

import pytest

from tests.native.models import TOLERANCE, compile_model, models, some_architectures

pytestmark = pytest.mark.comfyui


@contextlib.contextmanager
def scaled_weight(module):
    weight = [parameter for parameter in module.parameters() if parameter.ndim > 1][-1]
    before = weight.data.clone()
    weight.data.mul_(1.5)  # through .data: torch does not count it
    try:
        yield
    finally:
        weight.data.copy_(before)


@contextlib.contextmanager
def hook(module):
    last = [each for each in module.modules() if not list(each.children())][-1]
    handle = last.register_forward_hook(lambda module, inputs, output: output * 1.5)
    try:
        yield
    finally:
        handle.remove()


@some_architectures("SDXL", "Flux.1", "Qwen-Image")
@pytest.mark.parametrize("change", [scaled_weight, hook])
def test_a_change_between_two_steps(comfyui, architecture, change):
    from tests.native.sampling import relative_error, sample

    plain = models(architecture).plain

    def sample_with_change(model):
        """The change is there from the second step on."""
        calls = []
        with contextlib.ExitStack() as changes:

            def wrapper(apply_model, arguments):
                calls.append(1)
                if len(calls) == 2:
                    changes.enter_context(change(plain.model.diffusion_model))
                return apply_model(arguments["input"], arguments["timestep"], **arguments["c"])

            clone = model.clone()
            clone.set_model_unet_function_wrapper(wrapper)
            result = sample(clone, architecture, steps=3)
        assert len(calls) >= 3
        return result

    unchanged = sample(plain, architecture, steps=3)
    expected = sample_with_change(plain)
    assert relative_error(unchanged, expected) > 10 * TOLERANCE
    compiled = compile_model(plain)
    assert relative_error(expected, sample_with_change(compiled)) < TOLERANCE
    assert relative_error(unchanged, sample(compiled, architecture, steps=3)) < TOLERANCE


@some_architectures("Qwen-Image")
def test_prompts_that_run_one_after_the_other_are_searched_for_changes_once(comfyui, architecture, monkeypatch):
    """And behind the first: the devices have work while the host looks, and get more before that is done."""
    from comfy_tpu.compiler.host_weights import WeightChangeDetector
    from comfy_tpu.compiler.program import Program
    from tests.native.sampling import sample

    found, done = WeightChangeDetector.find_changed, []
    call = Program.__call__
    search = lambda *args, **options: done.append("search") or found(*args, **options)  # noqa: E731
    monkeypatch.setattr(WeightChangeDetector, "find_changed", search)
    monkeypatch.setattr(Program, "__call__", lambda *args, **inputs: done.append("run") or call(*args, **inputs))
    sample(models(architecture).compiled, architecture, steps=3)
    assert done[-6:] == ["run", "search", "run"] * 2
