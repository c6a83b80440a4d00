"""TPU Load LoRA in a real server: it changes the video, a changed file is another LoRA, without it nothing stays."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.comfyui.client import ComfyClient, Prompt
from tests.comfyui.graphs import ENCODER, SAMPLER, keep, three_nodes, whole_pipeline
from tests.comfyui.images import read_kept

pytestmark = pytest.mark.comfyui

HIDDEN = 256
NAME = "styles/small.safetensors"


def write(base: Path, seed: int, features: int = HIDDEN) -> None:
    path = base / "models" / "loras" / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    name = "diffusion_model.blocks.2.self_attn.v"
    tensors = {"lora_down.weight": torch.randn(4, features) * 0.2, "lora_up.weight": torch.randn(HIDDEN, 4) * 0.2}
    save_file({f"{name}.{part}": tensor for part, tensor in tensors.items()}, path)


def with_lora(prompt: Prompt, node: str, *strengths: float) -> Prompt:
    """One TPU Load LoRA behind the other, then the node."""
    chain = {}
    previous = None
    for number, strength in enumerate(strengths):
        inputs = {"lora_name": NAME, "strength": strength, **({"previous_lora": previous} if previous else {})}
        chain[f"lora {number}"] = {"class_type": "TPULoraLoader", "inputs": inputs}
        previous = [f"lora {number}", 0]
    user = {**prompt[node], "inputs": {**prompt[node]["inputs"], "lora": previous}}
    return {**prompt, **chain, node: user}


def latents(client: ComfyClient, base: Path, prompt: Prompt) -> torch.Tensor:
    client.succeed(keep(prompt, lora_latents=[SAMPLER, 0]))
    found: torch.Tensor = read_kept(base, "lora_latents")["samples"]
    return found


def test_a_lora_changes_the_video_and_leaves_nothing_behind(client: ComfyClient, base: Path) -> None:
    write(base, seed=1)
    plain = three_nodes(seed=40)
    before = latents(client, base, plain)
    compiled = client.status()["compiled"]["programs"]
    once = latents(client, base, with_lora(plain, SAMPLER, 1.0))
    twice = latents(client, base, with_lora(plain, SAMPLER, 0.25, 0.75))
    assert (once - before).abs().max() > 0.05
    assert torch.allclose(once, twice, atol=1e-3), "the parts add up"
    assert any("transformer + small.safetensors:1" in entry["label"] for entry in client.status()["resident"])
    client.empty_device()
    assert torch.equal(latents(client, base, plain), before)
    assert client.status()["compiled"]["programs"] == compiled, "no program of the transformer depends on a LoRA"


def test_a_file_that_changed_under_its_name_runs_the_sampler_again(client: ComfyClient, base: Path) -> None:
    write(base, seed=2)
    prompt = with_lora(three_nodes(seed=41), SAMPLER, 1.0)
    first = latents(client, base, prompt)
    write(base, seed=3)
    run = client.succeed(keep(prompt, lora_latents=[SAMPLER, 0]))
    assert SAMPLER in run.executed
    assert ENCODER in run.cached
    assert not torch.equal(read_kept(base, "lora_latents")["samples"], first)


def test_the_full_pipeline_takes_one_too(client: ComfyClient, base: Path) -> None:
    write(base, seed=4)
    prompt = whole_pipeline(seed=42)
    client.succeed(keep(prompt, lora_frames=["pipeline", 0]))
    before = read_kept(base, "lora_frames")
    client.succeed(keep(with_lora(prompt, "pipeline", 2.0), lora_frames=["pipeline", 0]))
    assert not torch.equal(read_kept(base, "lora_frames"), before)


def test_a_lora_that_does_not_fit_is_one_sentence_on_the_sampler(client: ComfyClient, base: Path) -> None:
    write(base, seed=5, features=HIDDEN // 2)
    error = client.fail(with_lora(three_nodes(seed=43), SAMPLER, 1.0))
    assert error["node_id"] == SAMPLER
    assert "by a tensor of shape (256, 128), and in model demo it has shape (256, 256)" in error["exception_message"]
    client.succeed(three_nodes(seed=43))


def test_one_for_a_part_of_the_noise_is_for_models_with_two_transformers(client: ComfyClient, base: Path) -> None:
    write(base, seed=6)
    prompt = with_lora(three_nodes(seed=45), SAMPLER, 1.0)
    for noise in ("high", "low"):
        prompt["lora 0"]["inputs"]["noise"] = noise
        error = client.fail(prompt)
        assert error["node_id"] == SAMPLER
        assert f"is for {noise} noise, but model demo has one transformer for all" in error["exception_message"]
    prompt["lora 0"]["inputs"]["noise"] = "all"
    client.succeed(prompt)


def test_what_is_no_lora_is_refused(client: ComfyClient) -> None:
    prompt = three_nodes(seed=44)
    prompt["text"] = {"class_type": "ProbeText", "inputs": {"value": "a LoRA"}}
    prompt[SAMPLER]["inputs"]["lora"] = ["text", 0]
    assert "lora is a" in client.fail(prompt)["exception_message"]
