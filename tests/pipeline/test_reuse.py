"""Which steps are left out: the curve, the plan made from it, and what the pipeline does with it."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from comfy_tpu.compiler.cache import count_compilations
from comfy_tpu.config import GenerationSettings, ReuseConfig, RuntimeConfig
from comfy_tpu.errors import CheckpointError, ComfyTpuError, InvalidValueError
from comfy_tpu.families.wan.model import WAN21
from comfy_tpu.pipeline import reuse
from comfy_tpu.pipeline.calibration import compare_velocities, measure_curve, save_measured_curve
from comfy_tpu.pipeline.embeddings import PromptEmbeddings
from comfy_tpu.pipeline.model_files import DEMO_DIRECTORY, ModelFiles
from comfy_tpu.pipeline.noise import initial_noise
from comfy_tpu.pipeline.progress import Progress
from comfy_tpu.pipeline.reuse import Curve, find_curve, save_curve
from comfy_tpu.pipeline.schedule import Schedule, make_schedule
from comfy_tpu.pipeline.step_plan import Plan, make_plan
from comfy_tpu.pipeline.video import VideoPipeline
from tests.closeness import assert_wrong_ones_differ, psnr
from tests.parity import small_models
from tests.pipeline import small_pipeline
from tests.pipeline.test_video import CHOSEN, PROMPT

RECOMMENDED = 0.12
SAME = 110
"""dB, of latents: 126 and more are found, and a prompt in which one word is another gives 75 or less."""
OTHER_PROMPT = "a red circle moving right"
TEN = CHOSEN | {"num_inference_steps": 10}


@functools.cache
def schedule(steps: int = 50, flow_shift: float = 5.0) -> Schedule:
    settings = GenerationSettings(flow_shift=flow_shift, num_inference_steps=steps)
    return make_schedule(WAN21.scheduling.factories["unipc"](settings))


def flat(change: float = 0.01, ratio: float = 1.0, count: int = 11) -> Curve:
    """Over sigma from 1 to 0, so the sums over a whole run are those of `count` - 1 steps."""
    steps = [0.0] + [change] * (count - 1)
    return Curve(np.linspace(1, 0, count), np.array([1.0] + [ratio] * (count - 1)), np.array(steps))


def plan(curve: Curve | None, threshold: float = RECOMMENDED, steps: int = 50, **more: Any) -> Plan:
    settings = GenerationSettings(num_inference_steps=steps, reuse=threshold, **more)
    return make_plan(schedule(steps), settings, curve)


def published(name: str) -> Curve:
    document = json.loads((reuse.PUBLISHED_DIRECTORY / name).read_text())
    return Curve(*(np.array(document[key]) for key in ("sigmas", "ratios", "changes")))


def test_without_a_curve_every_step_is_computed_and_guided() -> None:
    every = plan(None, 0.0)
    assert (every.reused, every.guided, every.forwards) == ((), 50, 100)


@pytest.mark.parametrize("name", WAN21.card.reuse_curves)
def test_published_curves_give_the_plan_of_magcache(name: str) -> None:
    """Its rule on its ratios, with its defaults: threshold 0.12, two in a row, a fifth of the steps computed first."""
    ratios = 1 - published(name).changes  # under 1 from the tenth step on, where the rule begins
    expected, product, error, row = [], 1.0, 0.0, 0
    for index in range(10, 50):
        product, row = product * ratios[index], row + 1
        error += abs(1 - product)
        if error < RECOMMENDED and row <= 2:
            expected.append(index + 1)
        else:
            product, error, row = 1.0, 0.0, 0
    made = plan(published(name))
    assert made.reused == tuple(expected)
    assert made.forwards == 2 * 25


def test_the_recommended_level_computes_half_of_fifty_steps_of_the_demo_model() -> None:
    curve = find_curve(ModelFiles.open("demo"))
    assert make_plan(schedule(50, 3.0), GenerationSettings(reuse=RECOMMENDED), curve).forwards <= 2 * 28


def test_the_first_fifth_is_computed_and_two_in_a_row_are_reused_at_most() -> None:
    made = plan(flat(0.0), 1.0)
    assert made.reused == tuple(number for number in range(11, 51) if (number - 10) % 3)
    assert make_plan(
        schedule(),
        GenerationSettings(reuse=1.0),
        flat(0.0),
        ReuseConfig(first_computed_fraction=0, max_consecutive_reused=1),
    ).reused == tuple(range(2, 51, 2))


def test_more_tolerance_never_computes_more() -> None:
    forwards = [plan(published("wan21-t2v-14b.json"), level).forwards for level in (1e-9, 0.01, 0.03, 0.06, 0.12, 1.0)]
    assert forwards == sorted(forwards, reverse=True)
    assert forwards[0] == 100


@pytest.mark.parametrize("steps", [1, 2, 5, 20, 37, 100])
def test_a_curve_holds_for_any_number_of_steps_and_any_shift(steps: int) -> None:
    curve = flat(change=0.02, ratio=0.9)
    for shift in (1.0, 3.0, 8.0):
        straight = np.linspace(1, 0.001, steps)
        sigmas = shift * straight / (1 + (shift - 1) * straight)
        ratios, changes = curve.resample(sigmas)
        assert (ratios[0], changes[0]) == (1.0, 0.0)
        way = 10 * (sigmas[0] - sigmas[-1])
        assert changes.sum() == pytest.approx(0.02 * way, abs=1e-5)
        assert ratios.prod() == pytest.approx(0.9**way, rel=1e-4)


def test_a_curve_goes_on_beyond_its_ends() -> None:
    inner = Curve(np.array([0.9, 0.5, 0.1]), np.ones(3), np.array([0.0, 0.4, 0.4]))
    np.testing.assert_allclose(inner.resample(np.array([1.0, 0.9, 0.1, 0.0]))[1], [0, 0.1, 0.8, 0.1], atol=1e-5)


def test_guidance_ends_after_its_share_of_the_steps() -> None:
    assert [plan(None, 0.0, guidance_until=share).guided for share in (0.0, 0.3, 0.5, 1.0)] == [0, 15, 25, 50]
    assert plan(None, 0.0, guidance_until=0.5).forwards == 75
    assert plan(None, 0.0, guidance_until=0.5, guidance_scale=1.0).forwards == 50
    ended = plan(flat(0.0), 1.0, guidance_until=0.46)  # 23 steps: the next would be reused otherwise
    assert 24 in plan(flat(0.0), 1.0).reused
    assert 24 not in ended.reused, "what guidance made does not stand for a step without it"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_pipeline.directory(), tmp_path / "model"))


def give_curve(directory: Path, curve: Curve) -> None:
    files = ModelFiles.open(directory)
    save_curve(
        directory / reuse.CURVE_FILE, curve, family=files.family.name, fingerprint=files.fingerprint, made_with={}
    )


@functools.cache
def with_curve() -> Path:
    path = small_models.temporary_directory() / "with-curve"
    shutil.copytree(small_pipeline.directory(), path)
    give_curve(path, flat(change=0.01, ratio=0.97))
    return path


@functools.cache
def opened(mesh: str = "single") -> VideoPipeline:
    return VideoPipeline.open(with_curve(), RuntimeConfig(mesh=mesh))


@functools.cache
def encoded(guidance_scale: float = 4.0, prompt: str = PROMPT) -> PromptEmbeddings:
    return opened().encode(prompt, opened().settings(**(TEN | {"guidance_scale": guidance_scale})))


def latents(pipeline: VideoPipeline, prompt: str = PROMPT, **changed: Any) -> torch.Tensor:
    settings = pipeline.settings(**(TEN | changed))
    return pipeline.denoise(encoded(settings.guidance_scale, prompt), settings)


def latents_by_diffusers(made: Plan, prompt: str = PROMPT) -> torch.Tensor:
    """What diffusers' transformer and scheduler give where they follow the plan."""
    settings = GenerationSettings(flow_shift=TEN["flow_shift"], num_inference_steps=len(made.steps))
    scheduler, pipeline = WAN21.scheduling.factories["unipc"](settings), small_pipeline.reference()
    scheduler.set_timesteps(len(made.steps))
    embeddings = pipeline.encode_prompt(prompt, TEN["negative_prompt"], max_sequence_length=TEN["max_sequence_length"])
    sample = initial_noise((1, 4, 3, 6, 10), TEN["seed"])
    velocity = torch.zeros_like(sample)
    for step, timestep in zip(made.steps, scheduler.timesteps, strict=True):
        if step.scale is not None:
            velocity = step.scale * velocity
        else:
            with torch.no_grad():
                positive, negative = (
                    pipeline.transformer(sample, timestep.expand(1), text, return_dict=False)[0] for text in embeddings
                )
            scale = TEN["guidance_scale"] if step.guided else 1.0
            velocity = negative + scale * (positive - negative)
        sample = scheduler.step(velocity, timestep, sample, return_dict=False)[0]
    return sample


def velocities(pipeline: VideoPipeline, **changed: Any) -> list[torch.Tensor]:
    settings = pipeline.settings(**(TEN | changed))
    return list(pipeline.velocities(encoded(settings.guidance_scale), settings))


def test_a_model_without_a_curve_says_how_to_get_one_before_anything_is_loaded(directory: Path) -> None:
    heard: list[Progress] = []
    pipeline = VideoPipeline.open(directory, RuntimeConfig(mesh="single"), on_progress=heard.append)
    settings = pipeline.settings(**(CHOSEN | {"reuse": 0.1}))
    text = rf"^reuse needs to know .*there is no .*reuse.json; run `comfy-tpu calibrate {directory}` once, or leave"
    with pytest.raises(InvalidValueError, match=text):
        pipeline.encode(PROMPT, settings)
    assert heard == []


SPOILED: dict[str, tuple[Callable[[dict[str, Any]], Any], type[ComfyTpuError], str]] = {
    "no JSON": (lambda d: "{", CheckpointError, "is not as comfy-tpu writes it"),
    "a list": (lambda d: [], CheckpointError, "expected an object with changes, family"),
    "another format": (lambda d: d | {"format": 2}, CheckpointError, "format is 2, this version reads 1"),
    "a key too many": (lambda d: d | {"x": 1}, CheckpointError, "expected an object with"),
    "lengths": (lambda d: d | {"ratios": [1.0]}, CheckpointError, "are lists of one length"),
    "text": (lambda d: d | {"ratios": ["a"] * 11}, CheckpointError, "could not convert"),
    "ragged": (lambda d: d | {"ratios": [[1.0], 1.0]}, CheckpointError, "inhomogeneous"),
    "NaN": (lambda d: d | {"changes": [float("nan")] * 11}, CheckpointError, "a number is NaN or infinite"),
    "rising": (lambda d: d | {"sigmas": d["sigmas"][::-1]}, CheckpointError, "sigmas do not fall within 1 to 0"),
    "negative": (lambda d: d | {"ratios": [-1.0] * 11}, CheckpointError, "a ratio is not over 0"),
    "another model": (lambda d: d | {"fingerprint": "ab"}, InvalidValueError, "was measured on another model .*, ab"),
    "another family": (lambda d: d | {"family": "Flux"}, InvalidValueError, r"another model \(Flux, "),
    "published": (lambda d: d | {"fingerprint": None}, InvalidValueError, "was measured on another model"),
}


@pytest.mark.parametrize(("spoil", "error", "text"), SPOILED.values(), ids=SPOILED)
def test_a_damaged_or_foreign_curve_is_refused(
    directory: Path, spoil: Callable[[dict[str, Any]], Any], error: type[ComfyTpuError], text: str
) -> None:
    give_curve(directory, flat())
    path = directory / reuse.CURVE_FILE
    find_curve(ModelFiles.open(directory))
    spoiled = spoil(json.loads(path.read_text()))
    path.write_text(spoiled if isinstance(spoiled, str) else json.dumps(spoiled))
    with pytest.raises(error, match=f"(?s){text}.*`comfy-tpu calibrate {directory}`"):
        find_curve(ModelFiles.open(directory))


@pytest.mark.parametrize(("name", "facts"), WAN21.card.reuse_curves.items())
def test_a_model_of_wan_has_its_published_curve(directory: Path, name: str, facts: dict[str, int]) -> None:
    path = directory / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(facts)))
    np.testing.assert_array_equal(find_curve(ModelFiles.open(directory)).changes, published(name).changes)


def test_the_demo_model_has_a_curve_of_its_own() -> None:
    assert (DEMO_DIRECTORY / reuse.CURVE_FILE).is_file()
    assert len(find_curve(ModelFiles.open("demo")).sigmas) == 50


def test_reused_velocities_are_the_last_one_scaled() -> None:
    pipeline = opened()
    made = pipeline.plan(pipeline.settings(**(TEN | {"reuse": 1.0})))
    assert made.reused == (3, 4, 6, 7, 9, 10)
    every, some = velocities(pipeline), velocities(pipeline, reuse=1.0)
    for before, velocity, step in zip(some[:-1], some[1:], made.steps[1:], strict=True):
        if step.scale is not None:
            assert 0.9 < step.scale < 1
            torch.testing.assert_close(velocity, np.float32(step.scale) * before, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(one, other) for one, other in zip(every[:2], some[:2], strict=True))
    assert not torch.allclose(every[4], some[4], rtol=1e-3), "what comes after a reused step is computed from it"


def test_a_level_compiles_one_small_program_and_the_next_none() -> None:
    pipeline = VideoPipeline.open(with_curve(), RuntimeConfig(mesh="single"))
    heard: list[Progress] = []
    lossless = latents(pipeline)
    pipeline.on_progress = heard.append
    reused = latents(pipeline, reuse=1.0)
    compiled = [event.label for event in heard if event.stage == "compiling" and event.done]
    assert compiled == ["transformer.reuse_step at 80×48×9"]
    assert [event.done for event in heard if event.reused] == [3, 4, 6, 7, 9, 10]
    with count_compilations() as count:
        other = latents(pipeline, reuse=0.02)
        assert torch.equal(latents(pipeline), lossless), "off is what it was, bit for bit"
        assert torch.equal(latents(pipeline, reuse=1.0), reused)
        assert torch.equal(latents(pipeline, reuse=1e-9), lossless), "below every change nothing is reused"
    assert count.requested == 0
    assert not torch.equal(other, reused)
    assert psnr(reused, lossless) > psnr(latents(pipeline, seed=8), lossless)


@pytest.mark.default_cases("{'reuse': 1.0, 'guidance_until': 0.5}")
@pytest.mark.parametrize("changed", [{"reuse": 1.0}, {"reuse": 1.0, "guidance_until": 0.5}], ids=str)
def test_a_run_with_reuse_is_what_diffusers_makes_of_its_plan(changed: dict[str, float]) -> None:
    """Reuse costs more than a prompt changes this model: that it is near all steps says nothing of the prompt."""
    made = opened().plan(opened().settings(**(TEN | changed)))
    expected = latents_by_diffusers(made)
    assert psnr(latents(opened(), **changed), expected) >= SAME
    assert_wrong_ones_differ(
        expected,
        SAME - 10,
        prompt=latents_by_diffusers(made, OTHER_PROMPT),
        every_step=latents(opened()),
        less=latents(opened(), **(changed | {"reuse": 0.02})),
    )


@pytest.mark.slow
def test_the_end_of_guidance_compiles_what_a_run_without_guidance_does() -> None:
    pipeline = VideoPipeline.open(with_curve(), RuntimeConfig(mesh="single"))
    guided, alone = latents(pipeline), latents(pipeline, guidance_scale=1.0)
    latents(pipeline, reuse=1.0)
    with count_compilations() as count:
        half = velocities(pipeline, guidance_until=0.5)
        assert torch.equal(latents(pipeline, guidance_until=1.0), guided)
        assert torch.equal(latents(pipeline, guidance_until=0.0), alone)
        latents(pipeline, guidance_until=0.5, reuse=1.0)
    assert count.requested == 0
    every = velocities(pipeline)
    assert [torch.equal(one, other) for one, other in zip(every, half, strict=True)] == [True] * 5 + [False] * 5


@pytest.mark.thorough  # by default: on one device
@pytest.mark.parametrize(
    "changed", [pytest.param({"reuse": 1.0}, marks=pytest.mark.slow), {"reuse": 1.0, "guidance_until": 0.5}]
)
def test_every_mesh_gives_the_same_video(changed: dict[str, float], caplog: pytest.LogCaptureFixture) -> None:
    alone = latents(opened(), **changed)
    assert psnr(latents(opened("dp=2,sp=4"), **changed), alone) >= SAME
    assert_wrong_ones_differ(alone, SAME - 10, prompt=latents(opened(), OTHER_PROMPT, **changed))
    warned = "guidance_until=0.5 saves no time on a mesh with dp=2" in caplog.text
    assert warned == ("guidance_until" in changed)


@pytest.mark.slow  # by default: tests/cli/test_demo.py, and the plan of a run above
def test_stages_are_the_whole_bit_for_bit() -> None:
    pipeline = opened()
    settings = pipeline.settings(**(TEN | {"reuse": 1.0, "guidance_until": 0.5}))
    parts = pipeline.decode(pipeline.denoise(pipeline.encode(PROMPT, settings), settings), settings)
    whole = pipeline.generate(PROMPT, settings)
    assert torch.equal(torch.cat(list(parts), dim=1), torch.cat(list(whole), dim=1))


def test_differences_are_magnitude_and_direction() -> None:
    first = torch.tensor([3.0, 4.0])
    ratios, changes = compare_velocities([first, 2 * first, torch.tensor([8.0, -6.0])])
    assert ratios == pytest.approx([1.0, 2.0, 1.0])
    assert changes == pytest.approx([0.0, 0.0, 2**0.5]), "a right angle"


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_model_that_answers_nothing_cannot_be_measured(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = VideoPipeline.open(with_curve(), RuntimeConfig(mesh="single"))
    monkeypatch.setattr(pipeline, "encode", lambda *arguments: None)
    monkeypatch.setattr(pipeline, "velocities", lambda *arguments: [torch.full((2,), value)] * 10)
    with pytest.raises(InvalidValueError, match="answers prompt 'x' with NaN, infinity or nothing but zeros"):
        measure_curve(pipeline, ["x"], pipeline.settings(**TEN))


def test_a_model_directory_may_ask_for_reuse_itself(directory: Path) -> None:
    (directory / "generation.json").write_text('{"reuse": 0.12, "guidance_until": 0.5}')
    settings = VideoPipeline.open(directory, RuntimeConfig(mesh="single")).settings()
    assert (settings.reuse, settings.guidance_until) == (0.12, 0.5)


@pytest.mark.thorough  # by default: tests/cli/test_calibrate.py
def test_a_calibrated_model_can_reuse(directory: Path) -> None:
    pipeline = VideoPipeline.open(directory, RuntimeConfig(mesh="single"))
    windows = {"context": "uniform", "context_stride": 2, "context_noise": "freenoise"}  # nor do they matter here
    settings = pipeline.settings(**(TEN | {"reuse": 0.0, "guidance_until": 0.5} | windows))
    curve = measure_curve(pipeline, [PROMPT, "a blue circle"], settings)
    save_measured_curve(directory / reuse.CURVE_FILE, curve, pipeline, [PROMPT, "a blue circle"], settings)
    expected = [compare_velocities(velocities(pipeline, seed=7))[1]]
    other = pipeline.settings(**(TEN | {"seed": 8}))
    expected.append(compare_velocities(pipeline.velocities(pipeline.encode("a blue circle", other), other))[1])
    np.testing.assert_allclose(find_curve(ModelFiles.open(directory)).changes, np.mean(expected, axis=0), atol=1e-5)
    assert pipeline.plan(pipeline.settings(**(TEN | {"reuse": 1.0}))).reused
    with pytest.raises(InvalidValueError, match="num_inference_steps=1 leaves nothing to compare; give 2 or more"):
        measure_curve(pipeline, [PROMPT], pipeline.settings(**(CHOSEN | {"num_inference_steps": 1})))
