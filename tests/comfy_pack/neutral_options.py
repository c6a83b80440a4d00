"""The values of TPU Options' widgets as a new node has them. Needs no ComfyUI."""

from typing import Any

NEUTRAL: dict[str, Any] = {
    "mesh": "auto",
    "dtype": "auto",
    "quantize": "none",
    "vae_backend": "torchax",
    "reuse": 0.0,
    "guidance_until": 1.0,
    "num_videos": 1,
    "attention": "auto",
    "attention_window": "full",
    "attention_blocks": "auto",
    "dense_max_tokens": 4096,
}
