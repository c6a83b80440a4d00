"""LoRA: ComfyUI applies it, the devices get what changed, and nothing is compiled again."""

import pytest

from tests.native.models import TABLE, TOLERANCE, compile_model, every_architecture, models

pytestmark = pytest.mark.comfyui


@pytest.fixture
def loras(comfyui, architecture):
    """Two LoRA files of the architecture; the names of the weights that they change."""
    from tests.native.loras import write_lora

    directory, plain = comfyui / "models" / "loras", models(architecture).plain
    names = [f"{architecture.name} {number}.safetensors" for number in (1, 2)]
    yield {name: write_lora(plain, directory / name, seed=seed, every=seed) for seed, name in enumerate(names, start=1)}
    for name in names:
        (directory / name).unlink()


@every_architecture
def test_loras(architecture, loras, watch, cell):
    """At three strengths, two stacked, changed, and taken away again: each as without us, and nothing compiled."""
    from tests.native.loras import apply_lora
    from tests.native.sampling import relative_error, sample

    cell.at(TABLE, architecture.name, "LoRA")
    both, (first, second) = models(architecture), loras
    bare = sample(both.plain, architecture)
    sample(both.compiled, architecture)
    watch.clear()
    results = [bare]
    for stack in (
        [(first, 0.3)],
        [(first, 1.0)],
        [(first, -0.5)],
        [(first, 1.0), (second, 0.7)],
        [(second, 1.0)],
        [],
    ):
        plain, compiled = both.plain, both.compiled
        for name, strength in stack:
            plain, compiled = apply_lora(plain, name, strength), apply_lora(compiled, name, strength)
        expected, got = sample(plain, architecture), sample(compiled, architecture)
        assert cell.error(relative_error(expected, got)) < TOLERANCE, stack
        if stack:
            apart = min(relative_error(expected, other) for other in results)
            assert apart > 5 * TOLERANCE, f"{stack} changes nothing"
            results.append(expected)
    assert cell.error(relative_error(bare, sample(both.compiled, architecture))) < TOLERANCE
    watch.assert_on_devices()
    assert watch.compiled == []


@every_architecture
def test_before_or_after_our_node(architecture, loras):
    from tests.native.loras import apply_lora
    from tests.native.sampling import relative_error, sample

    both, (first, second) = models(architecture), loras
    expected = sample(apply_lora(apply_lora(both.plain, first, 0.8), second, -0.4), architecture)
    between = apply_lora(compile_model(apply_lora(both.plain, first, 0.8)), second, -0.4)
    assert relative_error(expected, sample(between, architecture)) < TOLERANCE


@every_architecture
def test_only_changed_weights_move(architecture, loras, watch, monkeypatch):
    from comfy_tpu.compiler.host_weights import HostWeights
    from tests.native.loras import apply_lora
    from tests.native.sampling import sample

    compiled, (first, second) = models(architecture).compiled, loras
    moved = []
    read = HostWeights.read
    monkeypatch.setattr(HostWeights, "read", lambda self, name: moved.append(name) or read(self, name))
    sample(compiled, architecture)
    for stack in ([(first, 1.0)], [(second, 1.0)], [(second, 0.5)], []):
        moved.clear()
        model = compiled
        for name, strength in stack:
            model = apply_lora(model, name, strength)
        sample(model, architecture)
        changed = {name for lora, _ in stack for name in loras[lora]}
        before = set(loras[first]) if stack == [(second, 1.0)] else set(loras[second]) if not stack else set()
        assert set(moved) == changed | before
        assert len(moved) == len(set(moved))
        moved.clear()
        sample(model, architecture, seed=8)
        assert moved == []
