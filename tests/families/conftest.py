import pytest
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus

from comfy_tpu.families.qwen_image import image as qwen_image

SHARE = 16


@pytest.fixture
def reduced_areas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen-Image-Edit scales images to a million pixels: here, and in diffusers, to a sixteenth of that."""
    for name in ("VAE_AREA", "SHOWN_AREA"):
        monkeypatch.setattr(qwen_image, name, getattr(qwen_image, name) // SHARE)
    for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
        calculate = module.calculate_dimensions
        monkeypatch.setattr(
            module, "calculate_dimensions", lambda area, ratio, calculate=calculate: calculate(area // SHARE, ratio)
        )
