"""Long videos by context windows, against a plain loop and against ComfyUI's own handler, with diffusers' transformer
and scheduler in float32 and the same noise; and how many programs they need."""

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comfy_tpu.compiler.cache import count_compilations
from comfy_tpu.config import GenerationSettings, RuntimeConfig
from comfy_tpu.families.context import ContextWindows
from comfy_tpu.families.wan.model import WAN21
from comfy_tpu.pipeline import windows
from comfy_tpu.pipeline.noise import initial_noise, shuffle_noise
from comfy_tpu.pipeline.progress import Progress
from comfy_tpu.pipeline.video import VideoPipeline
from tests import comfyui_context_windows
from tests.closeness import SAME, assert_wrong_ones_differ, psnr
from tests.covering import covering
from tests.pipeline import small_pipeline

PROMPT = "a red circle moving left"
CHOSEN: dict[str, Any] = {
    "height": 32,
    "width": 48,
    "num_frames": 29,  # 8 latents, in windows of 3 that overlap by 1: the last one overlaps more
    "num_inference_steps": 3,
    "guidance_scale": 4.0,
    "flow_shift": 3.0,
    "seed": 7,
    "negative_prompt": "blue background",
    "max_sequence_length": 32,
    "context_frames": 9,
    "context_overlap": 4,
}
Blend = Callable[[int, torch.Tensor, torch.Tensor, Callable[[torch.Tensor, bool], torch.Tensor]], torch.Tensor]
"""(number of the step, timestep, latents, the model on a window with the prompt or the negative one) -> velocity."""


@functools.cache
def opened(mesh: str = "single") -> VideoPipeline:
    return VideoPipeline.open(small_pipeline.directory(), RuntimeConfig(mesh=mesh))


def settings(**changed: Any) -> GenerationSettings:
    return opened().settings(**(CHOSEN | changed))


def denoise(mesh: str = "single", prompt: str = PROMPT, **changed: Any) -> torch.Tensor:
    made = settings(**changed)
    return opened(mesh).denoise(opened().encode(prompt, made), made)


def reference(blend: Blend, noise: torch.Tensor | None = None, **changed: Any) -> torch.Tensor:
    """diffusers' transformer and scheduler in a loop; `blend` puts the velocity of the video together."""
    made = settings(**changed)
    embeddings = opened().encode(PROMPT, made)
    assert embeddings.negative is not None
    texts = {True: embeddings.positive["text"], False: embeddings.negative["text"]}
    scheduler = WAN21.scheduling.factories[made.scheduler](made)
    transformer = small_pipeline.reference().transformer
    latents = initial_noise(opened().latent_shape(made), made.seed) if noise is None else noise
    for number, timestep in enumerate(scheduler.timesteps):

        def predict(window: torch.Tensor, positive: bool, timestep: torch.Tensor = timestep) -> torch.Tensor:
            text = texts[positive].expand(window.shape[0], -1, -1)
            with torch.no_grad():
                return transformer(window, timestep.expand(window.shape[0]), text, return_dict=False)[0]

        velocity = blend(number, timestep, latents, predict)
        latents = scheduler.step(velocity, timestep, latents, return_dict=False)[0]
    return latents


def guide(made: GenerationSettings, positive: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    return negative + made.guidance_scale * (positive - negative)


def blend_plainly(made: GenerationSettings, starts: Sequence[int], weights: Sequence[float]) -> Blend:
    """Windows of neighbouring frames, by slices."""

    def blend(number: int, timestep: torch.Tensor, latents: torch.Tensor, predict: Any) -> torch.Tensor:
        total, weight = torch.zeros_like(latents), torch.zeros(latents.shape[2])
        ramp = torch.tensor(weights)
        for start in starts:
            place = slice(start, start + len(weights))
            window = latents[:, :, place]
            velocity = guide(made, predict(window, True), predict(window, False))
            total[:, :, place] += velocity * ramp.view(-1, 1, 1)
            weight[place] += ramp
        return total / weight.view(-1, 1, 1)

    return blend


def blend_as_comfyui(made: GenerationSettings, schedule: str, weights: str, stride: int = 1) -> Blend:
    handler = comfyui_context_windows.handler(schedule, weights, 3, 1, stride)
    model = SimpleNamespace(latent_format=SimpleNamespace(temporal_downscale_ratio=4))

    def blend(number: int, timestep: torch.Tensor, latents: torch.Tensor, predict: Any) -> torch.Tensor:
        handler.set_step = lambda *_: setattr(handler, "_step", number)

        def compute(model: Any, conditions: Any, window: torch.Tensor, *_: Any) -> list[torch.Tensor]:
            return [predict(window, bool(positive)) for positive in (True, False)]

        options = {"transformer_options": {}}
        positive, negative = handler.execute(compute, model, [[], []], latents, timestep.view(1), options)
        return guide(made, positive, negative)

    return blend


@functools.cache
def plain(**changed: Any) -> torch.Tensor:
    made = settings(**changed)
    last = (made.num_frames - 1) // 4 + 1 - 3
    return reference(blend_plainly(made, [*range(0, last, 2), last], [1.0, 2.0, 1.0]), **changed)


SIZES: tuple[dict[str, int], ...] = ({}, {"height": 48, "width": 80, "num_frames": 21})


@pytest.mark.default_cases("dp=2,sp=4-size3")
@covering(
    "mesh, size",
    # The last four: among others, what auto takes on eight TPU chips.
    ("single", "dp=2,sp=4", "sp=8", "dp=8", "dp=4,sp=2", "dp=2,tp=4"),
    SIZES,
    strength=0,
    always=[("single", SIZES[0]), ("dp=2,sp=4", SIZES[1])],
)
def test_the_latents_are_those_of_a_plain_loop_on_every_mesh(mesh: str, size: dict[str, int]) -> None:
    assert psnr(denoise(mesh, **size), plain(**size)) >= SAME


KEYFRAMES = {"num_frames": 17, "num_inference_steps": 4, "context_keyframes": 0.5}
"""5 latents, in windows of 3: two steps of keyframes 0, 2 and 4, and two of windows."""


@functools.cache
def with_keyframes() -> torch.Tensor:
    made = settings(**KEYFRAMES)
    plainly = blend_plainly(made, [0, 2], [1.0, 2.0, 1.0])
    sigmas = WAN21.scheduling.factories[made.scheduler](made).sigmas

    def blend(number: int, timestep: torch.Tensor, latents: torch.Tensor, predict: Any) -> torch.Tensor:
        if number >= 2:
            return plainly(number, timestep, latents, predict)
        window = latents[:, :, ::2]
        keyframes = window - sigmas[number] * guide(made, predict(window, True), predict(window, False))
        predicted = torch.zeros_like(latents)
        predicted[:, :, ::2] = keyframes
        predicted[:, :, 1::2] = (keyframes[:, :, :-1] + keyframes[:, :, 1:]) / 2
        return (latents - predicted) / sigmas[number]

    return reference(blend, **KEYFRAMES)


@pytest.mark.parametrize("mesh", ["single", "dp=2,sp=4"])
def test_frames_between_keyframes_follow_them(mesh: str) -> None:
    assert psnr(denoise(mesh, **KEYFRAMES), with_keyframes()) >= SAME


def test_the_comparison_would_see_other_keyframes() -> None:
    wrong = {
        "fewer": denoise(**KEYFRAMES | {"context_keyframes": 0.25}),
        "none": denoise(**KEYFRAMES | {"context_keyframes": 0.0}),
    }
    assert_wrong_ones_differ(with_keyframes(), SAME - 20, **wrong)


def test_keyframes_compile_nothing_but_what_fills_the_frames_between() -> None:
    denoise(**KEYFRAMES | {"context_keyframes": 0.0})
    programs = opened("single").running.step_programs(0)
    before = programs.predict_windows().compiled_count
    assert before
    denoise(**KEYFRAMES)
    assert programs.predict_windows().compiled_count == before
    assert programs.fill_between().compiled_count == 1


@pytest.mark.slow  # by default: another request in test_video.py; blends in ComfyUI's words below
def test_the_comparison_would_see_other_windows() -> None:
    assert_wrong_ones_differ(
        plain(),
        SAME - 20,
        whole=denoise(context="none"),
        overlap=denoise(context_overlap=0),
        longer=denoise(context_frames=13),
        weights=denoise(context_weights="flat"),
        wider=denoise(context="uniform", context_stride=2),
        noise=denoise(context_noise="freenoise"),
        prompt=denoise(prompt="a blue circle moving right"),
    )


@pytest.mark.parametrize(
    ("schedule", "weights", "stride"),
    [
        ("static", "pyramid", 1),
        ("uniform", "flat", 2),
        pytest.param("static", "overlap-linear", 1, marks=pytest.mark.slow),
        pytest.param("uniform", "pyramid", 1, marks=pytest.mark.slow),
        pytest.param("looped", "pyramid", 2, marks=pytest.mark.slow),
        pytest.param("looped", "flat", 1, marks=pytest.mark.slow),
    ],
)
def test_the_latents_are_those_of_comfyuis_handler(schedule: str, weights: str, stride: int) -> None:
    blend = blend_as_comfyui(settings(), schedule, weights, stride)
    chosen = {"context": schedule, "context_weights": weights, "context_stride": stride}
    assert psnr(denoise(**chosen), reference(blend)) >= SAME


def test_freenoise_is_that_of_comfyui() -> None:
    module = comfyui_context_windows.load()
    for frames, length, overlap in ((8, 3, 1), (41, 21, 8), (22, 5, 0), (7, 5, 4)):
        noise = initial_noise((2, 3, frames, 2, 2), 5)
        expected = module.apply_freenoise(noise.clone(), 2, length, overlap, 11)
        assert torch.equal(shuffle_noise(noise, ContextWindows("static", frames, length, overlap), 11), expected)
        assert not torch.equal(expected, noise)


@pytest.mark.slow  # by default: a plain loop on dp=2,sp=4
@pytest.mark.parametrize(
    "chosen",
    [
        {"guidance_scale": 1.0},
        *(pytest.param(each, marks=pytest.mark.slow) for each in ({"num_videos": 2}, {"guidance_until": 0.4})),
    ],
)
def test_other_requests_on_a_mesh_that_divides_windows(chosen: dict[str, Any]) -> None:
    """Windows fill dp where branches and videos do not."""
    assert psnr(denoise("dp=2,sp=4", **chosen), denoise(**chosen)) >= SAME


@pytest.mark.thorough  # by default: one row's, above
def test_rows_of_several_prompts_are_videos_made_alone() -> None:
    from comfy_tpu.pipeline.embeddings import merge_embeddings

    pipeline, both = opened(), settings(num_videos=2, context_noise="freenoise")
    embeddings = [pipeline.encode(prompt, settings()) for prompt in (PROMPT, "a blue circle")]
    made = pipeline.denoise(merge_embeddings(embeddings), both, seeds=(7, 8))
    for row, (each, seed) in enumerate(zip(embeddings, (7, 8), strict=True)):
        alone = pipeline.denoise(each, settings(seed=seed, context_noise="freenoise"))
        assert psnr(made[row : row + 1], alone) >= SAME


def test_a_video_no_longer_than_a_window_is_made_whole_bit_for_bit() -> None:
    short = {"num_frames": 9}
    whole = denoise(**short, context="none")
    for context in ("auto", "static", "uniform"):
        assert torch.equal(denoise(**short, context=context), whole)
    assert torch.equal(denoise(**short, context="static", context_frames=17), whole)


def test_one_program_of_the_transformer_serves_every_length() -> None:
    """Those that depend on the whole video gather, add and advance latents; none of them has weights."""
    pipeline = VideoPipeline.open(small_pipeline.directory(), RuntimeConfig(mesh="single"))
    compiled: dict[int, list[str]] = {}
    for frames in (61, 93, 125):  # 8 windows and more, as many as go into a call here
        events: list[Progress] = []
        pipeline.on_progress = events.append
        made = pipeline.settings(**(CHOSEN | {"num_frames": frames, "num_inference_steps": 1}))
        pipeline.denoise(pipeline.encode(PROMPT, made), made)
        compiled[frames] = [each.what for each in events if each.stage == "compiling" and each.done]
    own = ["transformer.gather_windows", "transformer.add_windows", "transformer.advance_step"]
    assert sorted(compiled[61]) == sorted(
        ["text_encoder.encode_prompt", "transformer.prompt_cache", "transformer.predict_windows", *own]
    )
    assert [sorted(compiled[frames]) for frames in (93, 125)] == [sorted(own)] * 2
    assert pipeline.running.find_program("transformer.predict_windows").compiled_count == 1
    with count_compilations() as count:
        for changed in ({"seed": 8}, {"guidance_scale": 2.0}, {"context_weights": "flat"}, {"context_overlap": 8}):
            made = pipeline.settings(**(CHOSEN | {"num_frames": 61, "num_inference_steps": 1} | changed))
            pipeline.denoise(pipeline.encode(PROMPT, made), made)
    assert count.requested == 0, "neither the blend nor the number of windows compiles anything"


def test_steps_are_reused_over_the_whole_video(monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    from comfy_tpu.pipeline import step_plan

    def plan_with_reuse(*arguments: Any, **options: Any) -> step_plan.Plan:
        steps = original(*arguments, **options).steps
        return step_plan.Plan((*steps[:1], dataclasses.replace(steps[1], scale=0.9), *steps[2:]))

    original = step_plan.make_plan
    monkeypatch.setattr("comfy_tpu.pipeline.video.make_plan", plan_with_reuse)
    last = torch.zeros(1)

    def blend(number: int, timestep: torch.Tensor, latents: torch.Tensor, predict: Any) -> torch.Tensor:
        nonlocal last
        plainly = blend_plainly(settings(), [0, 2, 4, 5], [1.0, 2.0, 1.0])
        last = 0.9 * last if number == 1 else plainly(number, timestep, latents, predict)
        return last

    assert psnr(denoise(), reference(blend)) >= SAME


def test_a_run_can_be_cancelled_between_two_calls_of_a_step() -> None:
    pipeline = VideoPipeline.open(small_pipeline.directory(), RuntimeConfig(mesh="single"))
    made = pipeline.settings(**(CHOSEN | {"num_frames": 125}))
    count = windows.windows_per_call(pipeline.family, made, pipeline.placement)
    assert count < 16, "a step has several calls"
    seen: list[int] = []

    def cancel(progress: Progress) -> None:
        if progress.stage == "denoising":
            seen.append(progress.done)
            if len(seen) == 2:
                raise KeyboardInterrupt

    embeddings = pipeline.encode(PROMPT, made)
    pipeline.on_progress = cancel
    with pytest.raises(KeyboardInterrupt):
        pipeline.denoise(embeddings, made)
    assert seen == [0, 0]


def test_windows_fill_dp() -> None:
    long = settings(num_frames=125)
    alone = settings(num_frames=125, guidance_scale=1.0)
    for mesh, guided, unguided in (("dp=2,sp=4", 1, 2), ("dp=8", 4, 8)):
        placement = opened(mesh).placement
        for made, least in ((long, guided), (alone, unguided)):
            count = windows.windows_per_call(WAN21, made, placement)
            rows = count * (2 if made is long else 1)
            assert rows % placement.sizes.dp == 0
            assert count >= least
    assert windows.windows_per_call(WAN21, settings(num_frames=9), opened("dp=8").placement) == 1
