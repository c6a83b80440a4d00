"""What `port new` learns of a pipeline that runs, and what it says where nothing explains it."""

from pathlib import Path

import pytest
import torch

from comfy_tpu.cli.main import main
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.shared.patches import as_latents, as_tokens
from comfy_tpu.families.shared.ported import in_vae_scale, module_of, unexplained
from comfy_tpu.porting.scaffold import hypotheses, new
from comfy_tpu.porting.scaffold.destination import Checkout
from comfy_tpu.porting.scaffold.facts import Facts, default_settings, own_scheduler, patch_of
from comfy_tpu.porting.scaffold.family_package import family_package
from comfy_tpu.porting.scaffold.hypotheses import LAYOUTS, agrees, first_that_holds
from comfy_tpu.porting.scaffold.learning import Learner
from comfy_tpu.porting.scaffold.proposing import Proposal
from comfy_tpu.porting.scaffold.runs import Learned
from tests.porting import small_pixart
from tests.porting.small_pixart import pixart

ROOT = Path(__file__).parents[2]
LATENTS = torch.randn(2, 4, 1, 6, 10, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def learner() -> Learner:
    found, learned = small_pixart.learner()
    found.learn = lambda: learned  # type: ignore[method-assign]
    return found


@pytest.fixture(scope="module")
def learned(learner: Learner) -> Learned:
    return learner.learn()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: each.name)
def test_every_layout_leads_back(layout: hypotheses.Layout) -> None:
    there = layout.to(LATENTS)
    assert tuple(there.shape[1:]) == layout.shape(4, 1, 6, 10)
    assert torch.equal(layout.of(there, 6, 10), LATENTS)
    assert torch.equal(as_latents(as_tokens(LATENTS), 6, 10), LATENTS)


def test_the_expression_that_holds_in_every_case() -> None:
    timestep, batch = torch.tensor([750.0]), 2
    cases = [({"timestep": timestep, "batch": batch}, torch.tensor([0.25, 0.25]))]
    assert first_that_holds(hypotheses.TIMESTEPS, cases) == "1 - timestep.expand(batch) / 1000"
    # One of several that hold in the first case does not in the second.
    half = [({"timestep": torch.tensor([500.0]), "batch": 2}, torch.tensor([0.5, 0.5]))]
    assert first_that_holds(hypotheses.TIMESTEPS, half) == "timestep.expand(batch) / 1000"
    assert first_that_holds(hypotheses.TIMESTEPS, [*half, *cases]) == "1 - timestep.expand(batch) / 1000"
    assert (
        first_that_holds(hypotheses.TIMESTEPS, [({"timestep": timestep, "batch": 2}, torch.tensor([3.0, 3]))]) is None
    )


def test_what_agrees() -> None:
    assert agrees(torch.tensor([1, 0]), torch.tensor([True, False]))
    assert not agrees(torch.ones(2), torch.ones(2, 1)), "another shape"
    assert not agrees(torch.ones(2), torch.ones(2) * 1.001)
    assert agrees(3, 3)
    assert not agrees(3, 3.0)


def test_pixart_is_explained(learned: Learned) -> None:
    assert learned.unexplained == []
    assert learned.arguments == {
        "hidden_states": "latents.squeeze(2)",
        "encoder_hidden_states": "text.to(dtype)",
        "timestep": "timestep.expand(batch)",
        "added_cond_kwargs": "{'resolution': None, 'aspect_ratio': None}",
        "encoder_attention_mask": "text_mask.int()",
    }
    assert learned.answer == "answer.chunk(2, dim=1)[0].unsqueeze(2)"
    assert learned.clean == "text.lower().strip()"
    assert learned.statistics == '[0.0] * channels, [1 / config["scaling_factor"]] * channels'
    assert [each.reading.written for each in learned.embeddings] == [
        "encode_t5(module, input_ids, attention_mask)",
        "attention_mask",
    ]


def test_the_defaults_are_the_pipelines(learned: Learned) -> None:
    settings = default_settings(pixart()[0], learned)
    assert (settings.height, settings.width, settings.num_frames) == (1024, 1024, 1)
    assert (settings.num_inference_steps, settings.guidance_scale, settings.scheduler) == (20, 4.5, "dpm++")
    assert settings.max_sequence_length == 300


def test_what_nothing_explains_is_said_and_fails_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hypotheses, "TIMESTEPS", ("timestep / 7",))
    monkeypatch.setattr(hypotheses, "STATISTICS", {})
    monkeypatch.setattr(hypotheses, "ANSWERS", ("-{}",))
    source, pipeline = pixart()
    own = type(pipeline.image_processor).postprocess
    monkeypatch.setattr(type(pipeline.image_processor), "postprocess", lambda *args, **more: own(*args, **more) / 2)
    found = Learner(source, pipeline).learn()
    assert found.unexplained == [
        "the transformer is given timestep, int64 (2,), and nothing tried says what it is",
        "the scheduler is given float32 (1, 4, 6, 10), which is no guided sum of the transformer's answers float32 "
        "(2, 8, 6, 10)",
        "the VAE is given float32 (1, 4, 6, 10), and no scale of the last latents is that",
        "the image is another than what the VAE decodes, brought to 0..1",
    ]
    proposal = Proposal((), (), {}, None, ())
    facts = Facts("mine", "mine", source, found, proposal, {}, "a/b", default_settings(source, found))
    text = family_package(facts)["transformer.py"]
    assert 'timestep=unexplained("timestep"),' in text
    assert 'return unexplained("answer")' in text
    with pytest.raises(NotImplementedError, match="timestep: diffusers' pipeline computes it in a way that"):
        unexplained("timestep")


def test_latents_in_the_vaes_scale() -> None:
    scaled = in_vae_scale(LATENTS, ([1.0, 0, 0, 0], [2.0, 1, 1, 1]))
    assert torch.equal(scaled[:, 0], LATENTS[:, 0] * 2 + 1)
    assert torch.equal(scaled[:, 1:], LATENTS[:, 1:])


def test_a_model_with_another_switch_is_refused() -> None:
    build = module_of("PixArtTransformer2DModel", {"use_additional_conditions": False})
    with pytest.raises(UnsupportedError, match="use_additional_conditions=True, and this family was written for False"):
        build({"use_additional_conditions": True})


def test_names_of_schedulers_and_patches() -> None:
    names = ("CogVideoXDDIMScheduler", "DPMSolverMultistepScheduler", "UniPCMultistepScheduler", "LMSDiscreteScheduler")
    assert [own_scheduler(name) for name in names] == ["ddim", "dpm++", "unipc", "lmsdiscrete"]
    assert patch_of({"patch_size": 2}) == (1, 2, 2)
    assert patch_of({"patch_size": [1, 2, 2]}) == (1, 2, 2)
    assert patch_of({"patch_size": 2, "patch_size_t": 2}) == (2, 2, 2)


def test_a_model_that_does_not_run_is_not_written(
    learner: Learner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(new, "small_pipeline", lambda source, configs: pixart()[1])
    monkeypatch.setattr(new, "Learner", lambda source, pipeline: learner)
    monkeypatch.setattr(new, "judged", lambda findings, trial, why: ("will not run", "it was made up"))
    monkeypatch.setattr(new, "try_small", lambda small, files: None)
    monkeypatch.setattr(new, "corrected", lambda findings, trial: [])
    monkeypatch.setattr(Checkout, "files", lambda self, facts: pytest.fail("files were made"))
    assert main(["port", "new", "mine", "--from", "PixArtSigmaPipeline", "--into", str(ROOT)]) == 1
    out = capsys.readouterr().out
    assert "PixArtTransformer2DModel: will not run: it was made up" in out
    assert "Nothing was written" in out
    assert not (ROOT / "src/comfy_tpu/families/mine").exists()
