"""preview.json: colours of first and later latent frames, and one sentence for a file that does not hold them."""

import json

import pytest
import torch

from comfy_tpu.errors import CheckpointError
from comfy_tpu.pipeline.model_files import DEMO_DIRECTORY
from comfy_tpu.pipeline.preview_colours import PREVIEW_FILE, PreviewColours, preview_features

CHANNELS = 2
FEATURES = 1 + CHANNELS + 3


def test_later_frames_have_colours_of_their_own() -> None:
    first, later = torch.full((FEATURES, 3), 0.125), torch.full((FEATURES, 3), 0.0625)
    latents = torch.tensor([[1.0, 1.0]])
    assert preview_features(latents).tolist() == [[1.0] * FEATURES]
    both = PreviewColours(first, later)
    assert [both.apply(latents, frame)[0, 0].item() for frame in (0, 1, 7)] == [0.75, 0.375, 0.375]
    assert PreviewColours(first).apply(latents, 1)[0, 0].item() == 0.75


def test_what_is_written_is_read() -> None:
    written = PreviewColours(torch.ones(FEATURES, 3), torch.zeros(FEATURES, 3))
    read = PreviewColours.read(json.loads(json.dumps(written.as_dict(CHANNELS))), CHANNELS, "x")
    assert read.later_weights is not None
    assert torch.equal(read.weights, written.weights)
    assert torch.equal(read.later_weights, torch.zeros(FEATURES, 3))
    alone = PreviewColours(written.weights).as_dict(CHANNELS)
    assert PreviewColours.read(alone, CHANNELS, "x").later_weights is None


@pytest.mark.parametrize(
    "change",
    [
        {"rgb_bias": [1.0, 2.0]},
        {"rgb_factors": "x"},
        {"unknown": 1},
        {"later_frames": {}},
        {"later_frames": 3},
        {"later_frames": {"rgb_bias": [0.0, 0.0, 0.0]}},
    ],
)
def test_a_file_without_the_colours_is_named(change: dict[str, object]) -> None:
    document = PreviewColours(torch.ones(FEATURES, 3)).as_dict(CHANNELS) | change
    with pytest.raises(CheckpointError, match=r"^x does not hold rgb_bias, .* for 2 channels, three numbers each"):
        PreviewColours.read(document, CHANNELS, "x")


def test_the_demo_has_colours_for_every_frame() -> None:
    document = json.loads((DEMO_DIRECTORY / PREVIEW_FILE).read_text(encoding="utf-8"))
    assert PreviewColours.read(document, 16, "x").later_weights is not None
