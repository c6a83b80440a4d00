"""Stock ComfyUI graphs in a real server with one node of ours in them, and the demo model for meaning."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.closeness import psnr
from tests.comfyui.client import ComfyClient, Prompt
from tests.comfyui.graphs import ENCODER, keep, three_nodes
from tests.comfyui.images import read_kept
from tests.comfyui.test_exchange import NATIVE, ksampler, native_decoder, shows_a_red_circle
from tests.comfyui.workflows import STEPS

pytestmark = pytest.mark.comfyui

CHOICES = {"mesh": "auto", "precision": "auto", "attention": "auto"}
SAME = 40.0


def stock(**changed: Any) -> Prompt:
    """KSampler with ComfyUI's model and VAE; only the prompt is read by our encoder."""
    return {
        ENCODER: three_nodes()[ENCODER],
        **NATIVE,
        **ksampler([ENCODER, 0], [ENCODER, 1], **changed),
        "frames": native_decoder(["ksampler", 0]),
    }


def compiled(**changed: Any) -> Prompt:
    """The same graph with our nodes after its loaders."""
    prompt = stock(**changed)
    prompt["tpu model"] = {"class_type": "TPUCompileModel", "inputs": {"model": ["shifted", 0], **CHOICES}}
    prompt["tpu vae"] = {"class_type": "TPUCompileVAE", "inputs": {"vae": ["vae", 0], **CHOICES}}
    prompt["ksampler"]["inputs"]["model"] = ["tpu model", 0]
    prompt["frames"]["inputs"]["vae"] = ["tpu vae", 0]
    return prompt


@pytest.mark.smoke
def test_a_stock_graph_gives_the_same_video_with_our_nodes_in_it(client: ComfyClient, base: Path) -> None:
    client.succeed(keep(stock(steps=STEPS), before=["ksampler", 0], stock=["frames", 0]))
    client.succeed(keep(compiled(steps=STEPS), tpu=["frames", 0]))
    client.succeed(keep(stock(steps=STEPS, seed=1), other=["ksampler", 0]))
    client.succeed(keep(stock(steps=STEPS), after=["ksampler", 0]))
    tpu, plain = read_kept(base, "tpu"), read_kept(base, "stock")
    assert shows_a_red_circle(tpu)
    assert psnr(tpu, plain) >= SAME
    # Without the node again: what ComfyUI gave before it was there, bit for bit.
    assert (read_kept(base, "before")["samples"] == read_kept(base, "after")["samples"]).all()


def test_a_second_seed_loads_and_compiles_nothing(client: ComfyClient) -> None:
    client.succeed(keep(compiled(steps=2, seed=1), x=["frames", 0]))
    before = client.status()
    run = client.succeed(keep(compiled(steps=2, seed=2), x=["frames", 0]))
    after = client.status()
    assert after["compiled"] == before["compiled"]
    assert not [text for text in run.texts() if "loading" in text or "compiling" in text]
    assert {"vae", "model", "tpu model", "tpu vae"} <= run.cached


@pytest.mark.parametrize("sampler", ["euler", "dpmpp_2m", "res_multistep"])
def test_another_sampler_compiles_nothing(client: ComfyClient, sampler: str) -> None:
    client.succeed(keep(compiled(steps=2, seed=3), x=["ksampler", 0]))
    before = client.status()["compiled"]
    client.succeed(keep(compiled(steps=2, seed=3, sampler_name=sampler), x=["ksampler", 0]))
    assert client.status()["compiled"] == before


def test_steps_and_residents_are_on_the_panel_and_free_empties_the_devices(client: ComfyClient) -> None:
    run = client.succeed(keep(compiled(steps=4, seed=4), x=["frames", 0]))
    status = client.status()
    shown = {(entry["model"], entry["part"]) for entry in status["resident"]}
    assert {("WAN 2.1 T2V", "transformer"), ("WanVAE", "vae")} <= shown
    assert status["activity"]["stage"] == "idle"
    # In pixels, not in latents.
    assert any(text.startswith("64×64, 17 frames · step 3/4") for text in run.texts("ksampler"))
    for node in ("ksampler", "frames"):
        assert re.fullmatch(r"done in \d+\.\d s", run.texts(node)[-1])
    client.empty_device()
    assert client.status()["resident"] == []
    client.succeed(keep(compiled(steps=2, seed=5), x=["frames", 0]))


def test_cancel_takes_effect_within_a_step_and_the_next_run_works(client: ComfyClient) -> None:
    client.succeed(keep(compiled(steps=2, seed=6), x=["ksampler", 0]))
    run = client.queue(keep(compiled(steps=500, seed=7), x=["ksampler", 0]))
    client.wait(run, lambda run: any("step 2/" in text for text in run.texts("ksampler")), "a step")
    client.interrupt()
    client.finish(run)
    assert run.outcome == "execution_interrupted"
    assert run.texts("ksampler")[-1].startswith("cancelled after ")
    assert client.status()["activity"]["stage"] == "idle"
    client.succeed(keep(compiled(steps=2, seed=8), x=["ksampler", 0]))


def with_model_node(prompt: Prompt, class_type: str, **inputs: Any) -> Prompt:
    """The graph with one more node between the sampler and its model."""
    model = prompt["ksampler"]["inputs"]["model"]
    sampler = {**prompt["ksampler"], "inputs": {**prompt["ksampler"]["inputs"], "model": ["patched", 0]}}
    return {
        **prompt,
        "patched": {"class_type": class_type, "inputs": {"model": model, **inputs}},
        "ksampler": sampler,
    }


def test_skip_layer_guidance_runs_on_the_devices(client: ComfyClient, base: Path) -> None:
    options = {"double_layers": "1", "single_layers": "", "scale": 3.0, "start_percent": 0.0, "end_percent": 1.0}

    def guided(prompt: Prompt) -> Prompt:
        return with_model_node(prompt, "SkipLayerGuidanceDiT", rescaling_scale=0.0, **options)

    client.succeed(keep(stock(steps=3), unguided=["ksampler", 0]))
    client.succeed(keep(guided(stock(steps=3)), host=["ksampler", 0]))
    client.succeed(keep(guided(compiled(steps=3)), tpu=["ksampler", 0]))
    unguided, host, tpu = (read_kept(base, name)["samples"] for name in ("unguided", "host", "tpu"))
    assert (unguided - host).abs().max() > 1e-2 * host.abs().max()
    assert (tpu - host).abs().max() < 1e-4 * host.abs().max()
    assert wan_fallbacks(client.status()) == []


def wan_fallbacks(status: dict[str, Any]) -> list[dict[str, Any]]:
    """The others are those of other tests, whose nodes did not run again since."""
    return [entry for entry in status["fallbacks"] if entry["what"] == "WanModel"]


def test_a_fallback_is_in_the_status_until_the_node_runs_on_the_devices_again(client: ComfyClient, base: Path) -> None:
    def patched(prompt: Prompt, *, reads_sigmas: bool) -> Prompt:
        return with_model_node(prompt, "NativeStepPatch", reads_sigmas=reads_sigmas)

    client.succeed(keep(patched(stock(steps=2), reads_sigmas=True), host=["ksampler", 0]))
    client.succeed(keep(patched(compiled(steps=2), reads_sigmas=True), tpu=["ksampler", 0]))
    assert (read_kept(base, "host")["samples"] == read_kept(base, "tpu")["samples"]).all()
    (entry,) = wan_fallbacks(client.status())
    assert (entry["node"], entry["compile_node"], entry["what"]) == ("ksampler", "tpu model", "WanModel")
    assert "reads sigmas among transformer_options" in entry["reason"]
    events = [message.data for message in client.messages if message.kind == "comfy_tpu.status"]
    assert wan_fallbacks(events[-1]) == [entry]
    client.succeed(keep(patched(compiled(steps=2), reads_sigmas=False), tpu=["ksampler", 0]))
    assert wan_fallbacks(client.status()) == []
