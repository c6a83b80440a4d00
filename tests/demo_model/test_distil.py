"""The distillation: what it trains, what it saves, and the LoRA that is shipped."""

from pathlib import Path

import pytest
import torch

from comfy_tpu.config import Lora, RuntimeConfig
from comfy_tpu.pipeline.lora_report import LoraTargets, report_lora
from comfy_tpu.pipeline.video import VideoPipeline
from tools.demo_model import distil
from tools.demo_model.captions import Attributes, plain_caption
from tools.demo_model.distil import DEMO, LATENTS, SIGMAS, Student, Teacher
from tools.demo_model.evaluate import generate_compiled
from tools.demo_model.score import observe

SHIPPED = Path(__file__).parents[2] / DEMO
LORA = SHIPPED / "lora" / "4step.safetensors"


def save(student: Student, path: Path) -> Path:
    distil.save(student, path)
    return path


def change(student: Student, scale: float) -> None:
    """By numbers that the file holds without rounding."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for each in student.trained.values():
            each.add_((scale * torch.randn(each.shape, generator=generator)).bfloat16())


def test_an_untrained_student_is_the_model_without_guidance() -> None:
    student, teacher = Student(SHIPPED), Teacher(SHIPPED)
    latents = torch.randn(1, *LATENTS, generator=torch.Generator().manual_seed(1))
    embeds = teacher.embed(["a red circle moving left"])
    with torch.no_grad():
        expected = teacher.transformer(latents, 1000 * SIGMAS[2:3], embeds, return_dict=False)[0]
        assert torch.equal(student.velocity(latents, torch.tensor([2]), embeds), expected)
        change(student, 0.01)
        assert not torch.allclose(student.velocity(latents, torch.tensor([2]), embeds), expected, atol=1e-3)


def test_the_file_fits_the_model_and_says_what_it_is_for(tmp_path: Path) -> None:
    student = Student(SHIPPED)
    report = report_lora(save(student, tmp_path / "x.safetensors"), LoraTargets.find("demo"))
    assert (report.problem, report.unmatched_keys, report.text_keys) == (None, (), 0)
    assert (report.matched_modules, report.preset) == (report.modules, "4step")
    assert {"low_rank": report.low_rank, "biases": report.biases, "differences": report.differences} == {
        "low_rank": 61,
        "biases": 67,
        "differences": 37,
    }


def test_the_shipped_file_is_such_a_one() -> None:
    report = report_lora(LORA, LoraTargets.find("demo"))
    assert (report.problem, report.unmatched_keys, report.preset) == (None, (), "4step")
    assert report.preset_settings == {
        "num_inference_steps": distil.STEPS,
        "guidance_scale": 1.0,
        "scheduler": "euler-trailing",
        "flow_shift": distil.FLOW_SHIFT,
    }


@pytest.mark.slow
def test_the_pipeline_makes_of_the_file_what_the_student_makes(tmp_path: Path) -> None:
    student = Student(SHIPPED)
    change(student, 0.02)
    path = save(student, tmp_path / "x.safetensors")
    pipeline = VideoPipeline.open(
        "demo", RuntimeConfig(mesh="single", dtype="float32"), loras=[Lora(path)], preset="auto"
    )
    settings = pipeline.settings(**pipeline.preset.settings, seed=7)
    made = pipeline.denoise(pipeline.encode("a red circle moving left", settings), settings)
    noise = torch.randn(1, *LATENTS, generator=torch.Generator().manual_seed(7))
    *_, expected = student.rollout(noise, Teacher(SHIPPED).embed(["a red circle moving left"]))
    error = (made - expected).square().mean().sqrt() / expected.std()
    assert error < 1e-4


@pytest.mark.slow
def test_a_short_distillation_from_beginning_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distil, "CHUNK", 2)
    distil.record(tmp_path, SHIPPED, clips=4, from_student=False)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("teacher-*.pt")}
    assert len(before) == 2
    distil.record(tmp_path, SHIPPED, clips=4, from_student=False)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("teacher-*.pt")} == before, "recorded once"
    distil.train(tmp_path, SHIPPED, steps=2, batch=2, rate=1e-3, seed=5)
    distil.record(tmp_path, SHIPPED, clips=2, from_student=True)
    first, own = (torch.load(next(tmp_path.glob(f"{kind}-*0.pt"))) for kind in ("teacher", "student-2"))
    assert torch.equal(first["begin"][:, 1:], first["end"][:, :-1]), "the teacher's segments meet"
    assert not torch.equal(own["begin"][:, 1:], own["end"][:, :-1]), "the student's begin where it arrives"
    distil.train(tmp_path, SHIPPED, steps=2, batch=2, rate=1e-3, seed=5)
    assert torch.load(tmp_path / "student.pt")["step"] == 4, "it went on"


@pytest.mark.slow
def test_four_steps_show_what_was_asked_for() -> None:
    wanted = [Attributes("red", "circle", "left", "black"), Attributes("blue", "square", "growing", "white")]
    videos = generate_compiled(SHIPPED, [plain_caption(each) for each in wanted], 20, 3.0, seed=1, preset="4step")
    for video, each in zip(videos, wanted, strict=True):
        assert all(observe(video).agrees(each).values())
