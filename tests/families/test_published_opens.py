"""Every published model opens from its configurations: directory, modules, programs, the default request."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import pytest
import torch

from comfy_tpu.bench.job import Job
from comfy_tpu.bench.machine import Bench
from comfy_tpu.bench.text import prompt_inputs
from comfy_tpu.bench.transformer import abstract_step
from comfy_tpu.bench.vae import VaeStream, vae_inputs
from comfy_tpu.errors import CheckpointError
from comfy_tpu.families.registry import family_cards
from comfy_tpu.families.settings import make_settings
from comfy_tpu.families.shared.published import read_published
from comfy_tpu.pipeline.config_files import check_repository
from comfy_tpu.pipeline.model_files import ModelFiles
from comfy_tpu.pipeline.step import StepPrograms

MODELS = {
    hub_id: (card.package, model) for card in family_cards() for model in card.models for hub_id in model.published
}
FILES = {"model_index": "model_index.json", "scheduler": "scheduler/scheduler_config.json"}


def write_model(directory: Path, package: str, hub_id: str) -> Path:
    """A model directory without weights. tests/families/test_published.py compares the facts with the real files."""
    for part, config in read_published(package, hub_id).items():
        path = directory / FILES.get(part, f"{part}/config.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(config))
    if MODELS[hub_id][1].transformer_count == 2 and not (directory / "transformer_2").exists():
        (directory / "transformer_2").symlink_to(directory / "transformer")
    return directory


@pytest.mark.parametrize("hub_id", MODELS)
def test_a_published_model_opens_and_takes_its_default_request(hub_id: str, tmp_path: Path) -> None:
    package, card = MODELS[hub_id]
    files = ModelFiles.open(write_model(tmp_path / "model", package, hub_id), name=hub_id, to_run=False)

    assert files.family.card is card
    assert files.defaults == card.defaults_of(hub_id)
    settings = make_settings(files.defaults, {}, card.limits)
    assert files.config(files.family.transformer) == dict(card.published[hub_id])
    assert files.embedding_shapes(settings)
    assert len(files.scheduler(settings).timesteps) == settings.num_inference_steps
    mean, deviation = files.latent_statistics
    assert len(mean) == len(deviation) == files.latent_channels


@pytest.mark.parametrize(
    ("hub_id", "file", "key", "owner"),
    [
        ("black-forest-labs/FLUX.1-dev", "transformer/config.json", "guidance_embeds", "FluxTransformer2DModel"),
        ("Qwen/Qwen-Image-Edit-2511", "transformer/config.json", "zero_cond_t", "QwenImageTransformer2DModel"),
        ("Qwen/Qwen-Image", FILES["scheduler"], "shift_terminal", "FlowMatchEulerDiscreteScheduler"),
        ("Lightricks/LTX-2", "transformer/config.json", "rope_type", "LTX2VideoTransformer3DModel"),
        ("Lightricks/LTX-2", "connectors/config.json", "rope_type", "LTX2TextConnectors"),
    ],
)
def test_a_published_model_without_a_key_that_makes_it_is_refused(
    hub_id: str, file: str, key: str, owner: str, tmp_path: Path
) -> None:
    directory = write_model(tmp_path / "model", MODELS[hub_id][0], hub_id)
    config = json.loads((directory / file).read_text())
    del config[key]
    (directory / file).write_text(json.dumps(config))
    expected = f"{file} lacks {key}, without which {owner} of diffusers .* is not the published model; download the mo"
    with pytest.raises(CheckpointError, match=expected):
        ModelFiles.open(directory, name=hub_id, to_run=False)
    assert ModelFiles.open(directory, name="a fine-tune", to_run=False)

    def read_before_download(name: str) -> dict[str, Any]:
        return json.loads((directory / name).read_text()) if (directory / name).is_file() else {}

    with pytest.raises(CheckpointError, match=expected):
        check_repository(read_before_download("model_index.json"), read_before_download, hub_id)
    check_repository(read_before_download("model_index.json"), read_before_download, "owner/a-fine-tune")


def test_a_published_model_with_the_configurations_of_another_is_refused(tmp_path: Path) -> None:
    package, hub_id = MODELS["Tongyi-MAI/Z-Image"][0], "Tongyi-MAI/Z-Image-Turbo"
    directory = write_model(tmp_path / "model", package, hub_id)
    expected = "^model=Tongyi-MAI/Z-Image has the configurations of Z-Image Turbo, expected those of Z-Image; download"
    with pytest.raises(CheckpointError, match=expected):
        ModelFiles.open(directory, name="Tongyi-MAI/Z-Image", to_run=False)


@pytest.mark.thorough
@pytest.mark.parametrize("hub_id", MODELS)
def test_the_programs_of_a_published_model_are_traced(hub_id: str, tmp_path: Path) -> None:
    """In full width: nothing is allocated. Configurations that several models have are traced once."""
    card = MODELS[hub_id][1]
    step = max(card.limits.size_multiple, card.limits.size_min)
    frames = 1 if card.makes_images else 4 * card.temporal_scale + 1
    size = f"{6 * step}x{4 * step}x{frames}"
    job = Job("compile", model=hub_id, size=size, dtype="bfloat16", cache_directory=str(tmp_path))
    bench = Bench.open(job)
    family = bench.model.family
    for spec in family.components:
        name = "transformer" if spec in family.denoiser.transformers else spec.name
        _trace(name, json.dumps(bench.model.config(spec), sort_keys=True), family.name, bench)


_traced: dict[tuple[str, str, str], Any] = {}


def _trace(part: str, config: str, family: str, bench: Bench) -> None:
    owner = "" if part.startswith("text_encoder") else family
    if (part, config, owner) not in _traced:
        _traced[part, config, owner] = True
        TRACE.get(part, _trace_encoder)(bench, part)


def _trace_step(bench: Bench, part: str) -> None:
    family = bench.model.family
    component = bench.component(family.transformer, bench.model.config(family.transformer))
    if family.card.makes_segments:  # a segment has inputs that benchmarks do not make; tests/families has its step
        assert component.abstract_weights()
        return
    weights, inputs = abstract_step(bench, component, bench.job.size)
    samples, _ = StepPrograms(family.denoiser, component.program).compute().shapes(weights, **inputs)
    assert samples[0].shape == inputs["samples"][0].shape


def _trace_vae(bench: Bench, part: str) -> None:
    spec = bench.model.family.vae.component
    component = bench.component(spec, bench.model.config(spec))
    for direction, shape in vae_inputs(bench, bench.job.size).items():
        stream = getattr(VaeStream, direction)(bench, torch.empty(shape, device="meta"))
        program, weights = stream.program(component, lambda event: None), component.abstract_weights()
        parts = [
            {name: jax.ShapeDtypeStruct(tuple(tensor.shape), "float32") for name, tensor in each.items()}
            for each in stream.parts[:3]  # the cache has its final shape after two
        ]
        made = stream.run(functools.partial(program.shapes, weights), parts)
        assert all(min(each.shape) > 0 for each in made)


def _trace_encoder(bench: Bench, part: str) -> None:
    for encoder in bench.model.family.text.encoders:
        # One that sees images needs a processor, which is no configuration of a module.
        if encoder.component.name == part and not encoder.takes and encoder.read_images is None:
            component = bench.component(encoder.component, bench.model.config(encoder.component))
            tokens = {
                name: jax.ShapeDtypeStruct(tuple(tensor.shape), "int32")
                for name, tensor in prompt_inputs(bench, encoder).items()
            }
            assert component.program(encoder.encode).shapes(component.abstract_weights(), **tokens)
            return
    (spec,) = (spec for spec in bench.model.family.components if spec.name == part)
    assert bench.component(spec, bench.model.config(spec)).abstract_weights()


TRACE = {"transformer": _trace_step, "vae": _trace_vae}
