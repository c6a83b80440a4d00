"""Prompts that the tests build by hand, in the API's format."""

from typing import Any

from tests.comfyui.client import Prompt
from tests.comfyui.workflows import FRAMES, RED_CIRCLE

ENCODER, SAMPLER, DECODER, FRAMES_OUT, LATENT_OUT = "encoder", "sampler", "decoder", "frames", "latents"


def three_nodes(
    *,
    text: str = RED_CIRCLE,
    negative: str = "",
    seed: Any = 2025,
    steps: Any = 2,
    frames: Any = FRAMES,
    model: Any = "demo",
    guidance: Any = 3.0,
    **sampler: Any,
) -> Prompt:
    """Text encoder, sampler and decoder; the frames are previewed by ComfyUI's own node."""
    return {
        ENCODER: {
            "class_type": "Wan21TextEncoder",
            "inputs": {"prompt": text, "negative_prompt": negative, "model_id": model},
        },
        SAMPLER: {
            "class_type": "Wan21TPUSampler",
            "inputs": {
                "prompt_embeds": [ENCODER, 0],
                "negative_prompt_embeds": [ENCODER, 1],
                "height": 256,
                "width": 256,
                "num_frames": frames,
                "num_inference_steps": steps,
                "guidance_scale": guidance,
                "seed": seed,
                "flow_shift": 3.0,
                "model_id": model,
                **sampler,
            },
        },
        DECODER: {
            "class_type": "Wan21TPUVAEDecoder",
            "inputs": {"latents": [SAMPLER, 0], "fps": 8, "model_id": model},
        },
        FRAMES_OUT: {"class_type": "PreviewImage", "inputs": {"images": [DECODER, 0]}},
    }


def whole_pipeline(
    *, text: str = RED_CIRCLE, seed: int = 2025, steps: int = 2, frames: Any = FRAMES, model: Any = "demo"
) -> Prompt:
    return {
        "pipeline": {
            "class_type": "Wan21TPUPipeline",
            "inputs": {
                "prompt": text,
                "negative_prompt": "",
                "height": 256,
                "width": 256,
                "num_frames": frames,
                "num_inference_steps": steps,
                "guidance_scale": 3.0,
                "seed": seed,
                "flow_shift": 3.0,
                "fps": 8,
                "model_id": model,
            },
        },
        FRAMES_OUT: {"class_type": "PreviewImage", "inputs": {"images": ["pipeline", 0]}},
    }


def keep(prompt: Prompt, **sources: list[Any]) -> Prompt:
    """The same, with nodes of the probe pack that write outputs to files: keep(prompt, latents=["sampler", 0])."""
    probes = {
        f"keep {name}": {"class_type": "ProbeKeep", "inputs": {"value": source, "name": name}}
        for name, source in sources.items()
    }
    return {**prompt, **probes}
