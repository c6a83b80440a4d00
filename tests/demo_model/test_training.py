"""The training: its rate, and where it begins."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import UMT5EncoderModel

from tools.demo_model.learning_rate import schedule
from tools.demo_model.train_image import ImageTrainer, ImageTraining
from tools.demo_model.train_video import Trainer, VideoTraining

DEMO = Path(__file__).parents[2] / "src" / "comfy_tpu" / "assets" / "demo"


def test_the_rate_follows_the_steps_or_the_time_whichever_is_further():
    assert schedule(0, 100, warmup=10) == pytest.approx(0.1)
    assert schedule(50, 100, warmup=10) == schedule(20, 100, warmup=10, passed=0.5) == pytest.approx(0.505)
    assert schedule(50, 100, warmup=10, passed=0.2) == pytest.approx(0.505)
    assert schedule(20, 100, warmup=10, passed=1.5) == pytest.approx(0.01)


@pytest.fixture
def without_clips(monkeypatch):
    monkeypatch.setattr(Trainer, "_pool", lambda trainer, vae, scratch: {})


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_training_goes_on_from_saved_weights(without_clips, tmp_path):
    trainer = Trainer(VideoTraining(phrases=1, freeze_text=True), None, "cpu", tmp_path)
    trainer.start_from(DEMO)
    _assert_saved(trainer, DEMO)
    trained = sum(parameter.numel() for parameter in trainer.trained)
    assert trained == sum(parameter.numel() for parameter in trainer.model.transformer.parameters())
    text_encoder = UMT5EncoderModel.from_pretrained(DEMO / "text_encoder", dtype=torch.float32)
    trainer = ImageTrainer(ImageTraining(phrases=1), None, text_encoder, "cpu", tmp_path)
    trainer.start_from(DEMO / "image_to_video")
    _assert_saved(trainer, DEMO / "image_to_video")


def _assert_saved(trainer: Trainer, model: Path) -> None:
    saved = load_file(model / "transformer" / "diffusion_pytorch_model.safetensors")
    for mine in (trainer.model, trainer.average):
        weights = mine.transformer.state_dict()
        assert weights.keys() == saved.keys()
        for name, weight in weights.items():
            assert weight.dtype == torch.float32
            torch.testing.assert_close(weight, saved[name].float(), rtol=0, atol=0)
