"""Frames of what the server returns: images, videos and kept tensors."""

import io
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from PIL import Image

from tests.comfyui.client import ComfyClient


def read_kept(base: Path, name: str) -> Any:
    """What a ProbeKeep wrote. weights_only: whatever is there must be plain tensors, dicts and lists."""
    return torch.load(base / "output" / f"{name}.pt", weights_only=True)


def decode_video(content: bytes) -> tuple[np.ndarray, float]:
    """[frames, height, width, 3] in 0..1, and frames per second."""
    with av.open(io.BytesIO(content)) as container:
        stream = container.streams.video[0]
        rate = float(stream.average_rate or 0)
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
    return np.stack(frames).astype(np.float64) / 255, rate


def decode_images(client: ComfyClient, entries: list[dict[str, str]]) -> np.ndarray:
    images = [Image.open(io.BytesIO(client.view(entry))).convert("RGB") for entry in entries]
    return np.stack([np.asarray(image) for image in images]).astype(np.float64) / 255
