"""Our types are ComfyUI's: what one side makes, the other reads, and both show the same video."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from comfy_tpu.pipeline.model_files import DEMO_DIRECTORY
from tests.closeness import psnr
from tests.comfyui.client import ComfyClient, Prompt
from tests.comfyui.graphs import DECODER, ENCODER, SAMPLER, keep, three_nodes, whole_pipeline
from tests.comfyui.images import read_kept
from tests.comfyui.workflows import DEMO_TRANSFORMER, DEMO_VAE, FRAMES, RED_CIRCLE, STEPS
from tools.demo_model.captions import Attributes
from tools.demo_model.score import observe

pytestmark = pytest.mark.comfyui

SAME = 40.0
"""dB. ComfyUI computes on torch, we on XLA; a wrong scale of the latents gives less than 20."""

NATIVE: Prompt = {
    "vae": {"class_type": "VAELoader", "inputs": {"vae_name": DEMO_VAE}},
    "model": {"class_type": "NativeDemoModel", "inputs": {"unet_name": DEMO_TRANSFORMER}},
    "shifted": {"class_type": "ModelSamplingSD3", "inputs": {"model": ["model", 0], "shift": 3.0}},
    "text": {"class_type": "NativeDemoText", "inputs": {"directory": str(DEMO_DIRECTORY)}},
}


def our_decoder(latents: list[Any]) -> dict[str, Any]:
    return {"class_type": "Wan21TPUVAEDecoder", "inputs": {"latents": latents, "fps": 8, "model_id": "demo"}}


def native_decoder(latents: list[Any]) -> dict[str, Any]:
    return {"class_type": "VAEDecode", "inputs": {"samples": latents, "vae": ["vae", 0]}}


def ksampler(positive: list[Any], negative: list[Any], **changed: Any) -> Prompt:
    size = {"width": 64, "height": 64, "length": FRAMES, "batch_size": 1}
    inputs = {
        "model": ["shifted", 0],
        "positive": positive,
        "negative": negative,
        "latent_image": ["empty", 0],
        "seed": 2025,
        "steps": STEPS,
        "cfg": 3.0,
        "sampler_name": "uni_pc",
        "scheduler": "simple",
        "denoise": 1.0,
        **changed,
    }
    return {
        "empty": {"class_type": "EmptyHunyuanLatentVideo", "inputs": size},
        "ksampler": {"class_type": "KSampler", "inputs": inputs},
    }


def shows_a_red_circle(frames: torch.Tensor) -> bool:
    return all(observe(frames.numpy()).agrees(Attributes("red", "circle", "right", "black")).values())


def test_outputs_are_plain_host_data_in_comfyuis_types(client: ComfyClient, base: Path) -> None:
    prompt = keep(
        three_nodes(steps=STEPS),
        positive=[ENCODER, 0],
        negative=[ENCODER, 1],
        latents=[SAMPLER, 0],
        num_frames=[SAMPLER, 1],
        frames=[DECODER, 0],
        fps=[DECODER, 1],
    )
    client.succeed(prompt)
    for name in ("positive", "negative"):
        ((embeds, extra),) = read_kept(base, name)
        assert type(embeds) is torch.Tensor
        assert (embeds.shape, embeds.dtype, embeds.device.type) == ((1, 512, 128), torch.float32, "cpu")
        assert extra == {}
    latents = read_kept(base, "latents")
    assert list(latents) == ["samples"]
    assert type(latents["samples"]) is torch.Tensor
    assert (latents["samples"].shape, latents["samples"].dtype) == ((1, 16, 5, 8, 8), torch.float32)
    assert read_kept(base, "num_frames") == FRAMES
    frames = read_kept(base, "frames")
    assert type(frames) is torch.Tensor
    assert (frames.shape, frames.dtype, frames.device.type) == ((FRAMES, 64, 64, 3), torch.float32, "cpu")
    assert 0 <= frames.min() < 0.1
    assert 0.8 < frames.max() <= 1
    assert read_kept(base, "fps") == 8.0
    assert shows_a_red_circle(frames)


def test_comfyuis_vae_decodes_our_latents(client: ComfyClient, base: Path) -> None:
    prompt = {**three_nodes(steps=STEPS), **NATIVE, "native": native_decoder([SAMPLER, 0])}
    client.succeed(keep(prompt, ours=[DECODER, 0], theirs=["native", 0]))
    ours, theirs = read_kept(base, "ours"), read_kept(base, "theirs")
    assert shows_a_red_circle(theirs)
    assert psnr(ours, theirs) >= SAME


def test_our_decoder_reads_what_comfyuis_vae_encoded(client: ComfyClient, base: Path) -> None:
    prompt = {
        **three_nodes(steps=STEPS),
        **NATIVE,
        "encoded": {"class_type": "VAEEncode", "inputs": {"pixels": [DECODER, 0], "vae": ["vae", 0]}},
        "ours": our_decoder(["encoded", 0]),
        "theirs": native_decoder(["encoded", 0]),
    }
    client.succeed(keep(prompt, source=[DECODER, 0], ours=["ours", 0], theirs=["theirs", 0]))
    ours, theirs = read_kept(base, "ours"), read_kept(base, "theirs")
    assert psnr(ours, theirs) >= SAME
    assert shows_a_red_circle(ours)
    assert psnr(ours, read_kept(base, "source")) > 20  # an autoencoder's loss, but no other image


def test_our_decoder_reads_what_comfyuis_sampler_made_from_our_embeds(client: ComfyClient, base: Path) -> None:
    prompt = {
        ENCODER: three_nodes()[ENCODER],
        **NATIVE,
        **ksampler([ENCODER, 0], [ENCODER, 1]),
        "ours": our_decoder(["ksampler", 0]),
        "theirs": native_decoder(["ksampler", 0]),
    }
    client.succeed(keep(prompt, ours=["ours", 0], theirs=["theirs", 0]))
    ours, theirs = read_kept(base, "ours"), read_kept(base, "theirs")
    assert shows_a_red_circle(ours)
    assert psnr(ours, theirs) >= SAME


def test_our_sampler_reads_what_another_encoder_gave(client: ComfyClient, base: Path) -> None:
    texts: Prompt = {
        name: {"class_type": "CLIPTextEncode", "inputs": {"clip": ["text", 0], "text": text}}
        for name, text in {"positive": RED_CIRCLE, "negative": ""}.items()
    }
    prompt = {**three_nodes(steps=STEPS), **NATIVE, **texts}
    prompt["other"] = {
        "class_type": "Wan21TPUSampler",
        "inputs": {
            **prompt[SAMPLER]["inputs"],
            "prompt_embeds": ["positive", 0],
            "negative_prompt_embeds": ["negative", 0],
        },
    }
    prompt["theirs"] = our_decoder(["other", 0])
    client.succeed(keep(prompt, ours=[DECODER, 0], theirs=["theirs", 0]))
    assert psnr(read_kept(base, "ours"), read_kept(base, "theirs")) >= SAME


def test_comfyuis_sampler_goes_on_from_our_latents(client: ComfyClient, base: Path) -> None:
    """Half the noise put back and taken away again: the scale of the latents fits on the way in, too."""
    prompt = {
        **three_nodes(steps=STEPS),
        **NATIVE,
        **ksampler([ENCODER, 0], [ENCODER, 1], latent_image=[SAMPLER, 0], denoise=0.3),
        "refined": our_decoder(["ksampler", 0]),
    }
    client.succeed(keep(prompt, ours=[DECODER, 0], refined=["refined", 0]))
    refined = read_kept(base, "refined")
    assert shows_a_red_circle(refined)
    assert psnr(read_kept(base, "ours"), refined) > 20


def test_our_sampler_goes_on_from_comfyuis_latents_of_another_size(client: ComfyClient, base: Path) -> None:
    """Resized, with some noise put back and taken away again: the circle stays at its place."""
    begun = three_nodes(seed=7, steps=STEPS, initial_latents=["larger", 0], strength=0.2)
    prompt = {
        **begun,
        **NATIVE,
        **ksampler([ENCODER, 0], [ENCODER, 1]),
        "larger": {
            "class_type": "LatentUpscaleBy",
            "inputs": {"samples": ["ksampler", 0], "upscale_method": "bicubic", "scale_by": 1.5},
        },
        "alone": three_nodes(seed=7, steps=STEPS)[SAMPLER],
        "theirs": native_decoder(["ksampler", 0]),
        "elsewhere": our_decoder(["alone", 0]),
    }
    client.succeed(keep(prompt, ours=[DECODER, 0], theirs=["theirs", 0], elsewhere=["elsewhere", 0]))
    ours, theirs, elsewhere = (read_kept(base, name) for name in ("ours", "theirs", "elsewhere"))
    assert shows_a_red_circle(ours)
    assert psnr(ours, theirs) > 25 > 17 > psnr(elsewhere, theirs)


def test_two_videos_in_one_latent_decode_as_comfyuis_vae_does(client: ComfyClient, base: Path) -> None:
    prompt = {
        **three_nodes(steps=STEPS),
        **NATIVE,
        "twice": {"class_type": "RepeatLatentBatch", "inputs": {"samples": [SAMPLER, 0], "amount": 2}},
        "ours": our_decoder(["twice", 0]),
        "theirs": native_decoder(["twice", 0]),
    }
    client.succeed(keep(prompt, ours=["ours", 0], theirs=["theirs", 0]))
    assert read_kept(base, "ours").shape == (2 * FRAMES, 64, 64, 3)
    assert psnr(read_kept(base, "ours"), read_kept(base, "theirs")) >= SAME


def test_our_decoder_reads_an_uploaded_image_that_comfyuis_vae_encoded(client: ComfyClient, base: Path) -> None:
    """One latent frame is a video of one frame."""
    content = io.BytesIO()
    Image.new("RGB", (64, 64), (255, 0, 0)).save(content, "PNG")
    name = client.upload("red.png", content.getvalue()).json()["name"]
    prompt = {
        **NATIVE,
        "image": {"class_type": "LoadImage", "inputs": {"image": name}},
        "encoded": {"class_type": "VAEEncode", "inputs": {"pixels": ["image", 0], "vae": ["vae", 0]}},
        "ours": our_decoder(["encoded", 0]),
        "theirs": native_decoder(["encoded", 0]),
    }
    client.succeed(keep(prompt, ours=["ours", 0], theirs=["theirs", 0]))
    assert read_kept(base, "ours").shape == (1, 64, 64, 3)
    assert psnr(read_kept(base, "ours"), read_kept(base, "theirs")) >= SAME


def test_the_full_pipeline_is_the_three_nodes_in_one(client: ComfyClient, base: Path) -> None:
    prompt = {**three_nodes(steps=STEPS), **whole_pipeline(steps=STEPS)}
    client.succeed(keep(prompt, three=[DECODER, 0], one=["pipeline", 0], fps=["pipeline", 1]))
    assert psnr(read_kept(base, "three"), read_kept(base, "one")) >= SAME
    assert read_kept(base, "fps") == 8.0


def test_the_video_output_is_a_video(client: ComfyClient, base: Path) -> None:
    """Stock nodes take it apart again."""
    prompt = {
        **three_nodes(),
        "parts": {"class_type": "GetVideoComponents", "inputs": {"video": [DECODER, 2]}},
    }
    client.succeed(keep(prompt, images=["parts", 0], fps=["parts", 2], frames=[DECODER, 0]))
    assert torch.equal(read_kept(base, "images"), read_kept(base, "frames"))
    assert read_kept(base, "fps") == 8.0
