"""The evaluations: what they say of single frames, and that a batch gives what diffusers gives."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tools.demo_model import evaluate_image
from tools.demo_model.captions import Attributes
from tools.demo_model.clips import FRAMES, SIZE, draw, make_clips
from tools.demo_model.evaluate import compare_frames
from tools.demo_model.model import load_image_model
from tools.demo_model.score import edge_width

IMAGE_MODEL = Path(__file__).parents[2] / "src" / "comfy_tpu" / "assets" / "demo" / "image_to_video"
SQUARE, STAR = (Attributes("red", shape, "still", "black") for shape in ("square", "star"))


def drawn(*attributes: Attributes) -> np.ndarray:
    return draw(make_clips(list(attributes), torch.Generator().manual_seed(0))).permute(0, 2, 3, 4, 1).numpy()


def test_a_wrong_first_frame_is_told_from_the_others():
    square, star = drawn(SQUARE, STAR)
    star[0] = square[0]
    found = compare_frames(np.stack([square, star]), [SQUARE, STAR])
    assert (found["first"]["shape"], found["others"]["shape"]) == (0.5, 1.0)
    assert (found["first"]["colour"], found["first"]["background"], found["first"]["all"]) == (1.0, 1.0, 0.5)


def test_edges_are_as_wide_as_they_are_drawn():
    frame = drawn(SQUARE)[0, 0]
    assert edge_width(frame) == pytest.approx(1, abs=0.5)
    column = np.clip((np.arange(SIZE) - 16) / 8, 0, 1) * (np.arange(SIZE) < 48)
    ramp = np.zeros((SIZE, SIZE, 3))
    ramp[8:56] = column[:, None] * [0.9, 0.1, 0.1]
    assert edge_width(ramp) > 2 * edge_width(frame)
    assert np.isnan(edge_width(np.full((SIZE, SIZE, 3), 0.5)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_batch_of_images_gives_what_diffusers_gives_one_by_one():
    pipeline = load_image_model(IMAGE_MODEL)
    given = evaluate_image.tasks(2, 1, 2025)
    videos = evaluate_image.generate(pipeline, given, steps=2, guidance=3.0, seed=7)
    for number, (task, video) in enumerate(zip(given, videos, strict=True)):
        alone = pipeline(
            task.image,
            task.prompt,
            height=SIZE,
            width=SIZE,
            num_frames=FRAMES,
            num_inference_steps=2,
            guidance_scale=3.0,
            generator=torch.Generator().manual_seed(7 + number),
        ).frames[0]
        np.testing.assert_allclose(video, alone, atol=1e-4)
