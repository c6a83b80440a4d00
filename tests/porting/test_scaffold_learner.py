"""What `port new` learns of a pipeline that runs, and what it says where nothing explains it."""

from pathlib import Path

import pytest
import torch

from comfy_tpu.cli.main import main
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.shared.patches import as_latents, as_tokens
from comfy_tpu.families.shared.ported import in_vae_scale, module_of, unexplained
from comfy_tpu.porting.check import Check
from comfy_tpu.porting.scaffold import hypotheses, new
from comfy_tpu.porting.scaffold.destination import Checkout
from comfy_tpu.porting.scaffold.facts import Facts, default_settings, patch_height, scheduler_name
from comfy_tpu.porting.scaffold.family_files import render_family
from comfy_tpu.porting.scaffold.hypotheses import LAYOUTS, agrees, find_expression
from comfy_tpu.porting.scaffold.learner import learn_calls
from comfy_tpu.porting.scaffold.proposal import Proposal
from tests.porting.small_pixart import pixart, pixart_calls

ROOT = Path(__file__).parents[2]
LATENTS = torch.randn(2, 4, 1, 6, 10, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: each.name)
def test_every_layout_leads_back(layout: hypotheses.Layout) -> None:
    tensor = layout.from_latents(LATENTS)
    assert tuple(tensor.shape[1:]) == layout.shape(4, 1, 6, 10)
    assert torch.equal(layout.to_latents(tensor, 6, 10), LATENTS)
    assert torch.equal(as_latents(as_tokens(LATENTS), 6, 10), LATENTS)


def test_the_expression_that_holds_in_every_case() -> None:
    timestep, batch = torch.tensor([750.0]), 2
    cases = [({"timestep": timestep, "batch": batch}, torch.tensor([0.25, 0.25]))]
    assert find_expression(hypotheses.TIMESTEPS, cases) == "1 - timestep.expand(batch) / 1000"
    # One of several that hold in the first case does not in the second.
    half = [({"timestep": torch.tensor([500.0]), "batch": 2}, torch.tensor([0.5, 0.5]))]
    assert find_expression(hypotheses.TIMESTEPS, half) == "timestep.expand(batch) / 1000"
    assert find_expression(hypotheses.TIMESTEPS, [*half, *cases]) == "1 - timestep.expand(batch) / 1000"
    other = [({"timestep": timestep, "batch": 2}, torch.tensor([3.0, 3]))]
    assert find_expression(hypotheses.TIMESTEPS, other) is None


def test_what_agrees() -> None:
    assert agrees(torch.tensor([1, 0]), torch.tensor([True, False]))
    assert not agrees(torch.ones(2), torch.ones(2, 1)), "another shape"
    assert not agrees(torch.ones(2), torch.ones(2) * 1.001)
    assert agrees(3, 3)
    assert not agrees(3, 3.0)


def test_pixart_is_explained() -> None:
    calls = pixart_calls()
    assert calls.unexplained == []
    assert calls.arguments == {
        "hidden_states": "latents.squeeze(2)",
        "encoder_hidden_states": "text.to(dtype)",
        "timestep": "timestep.expand(batch)",
        "added_cond_kwargs": "{'resolution': None, 'aspect_ratio': None}",
        "encoder_attention_mask": "text_mask.int()",
    }
    assert calls.velocity == "answer.chunk(2, dim=1)[0].unsqueeze(2)"
    assert calls.prompt_cleanup == "text.lower().strip()"
    assert calls.latent_statistics == '[0.0] * channels, [1 / config["scaling_factor"]] * channels'
    assert [each.output.expression for each in calls.embeddings] == [
        "encode_t5(module, input_ids, attention_mask)",
        "attention_mask",
    ]


def test_the_defaults_are_the_pipelines() -> None:
    settings = default_settings(pixart()[0], pixart_calls())
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
    found = learn_calls(source, pipeline)
    assert found.unexplained == [
        "the transformer is given timestep, int64 (2,), and nothing tried says what it is",
        "the scheduler is given float32 (1, 4, 6, 10), which is no guided sum of the transformer's answers float32 "
        "(2, 8, 6, 10)",
        "the VAE is given float32 (1, 4, 6, 10), and no scale of the last latents is that",
        "the image is another than what the VAE decodes, brought to 0..1",
    ]
    proposal = Proposal((), (), {}, None, ())
    facts = Facts("mine", "mine", source, found, proposal, {}, "a/b", default_settings(source, found))
    text = render_family(facts)["transformer.py"]
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
    assert [scheduler_name(name) for name in names] == ["ddim", "dpm++", "unipc", "lmsdiscrete"]
    assert patch_height({"patch_size": 2}) == 2
    assert patch_height({"patch_size": [1, 4, 4]}) == 4
    assert patch_height({"patch_size": None}) == patch_height({}) == 1


def test_a_model_that_does_not_run_is_not_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(new, "build_small_pipeline", lambda source, configs: pixart()[1])
    monkeypatch.setattr(new, "learn_calls", lambda source, pipeline: pixart_calls())
    monkeypatch.setattr(
        new, "check_small_model", lambda target, small: Check(target, "will not run", "it was made up", ())
    )
    monkeypatch.setattr(Checkout, "files", lambda self, facts: pytest.fail("files were made"))
    assert main(["port", "new", "mine", "--from", "PixArtSigmaPipeline", "--into", str(ROOT)]) == 1
    out = capsys.readouterr().out
    assert "PixArtTransformer2DModel: will not run: it was made up" in out
    assert "Nothing was written" in out
    assert not (ROOT / "src/comfy_tpu/families/mine").exists()
