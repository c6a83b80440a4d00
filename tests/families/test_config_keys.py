"""Keys of configurations: those of published models pass, unknown ones stop with both ways on."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import diffusers
import pytest

from comfy_tpu.errors import CheckpointError, UnsupportedError
from comfy_tpu.families.registry import load_families
from comfy_tpu.families.shared.config_checks import check_index, check_scheduler, check_tokenizer, clean_config
from comfy_tpu.families.shared.published import NO_EFFECT
from tests.real_lists import PUBLISHED, needs_published

OTHER_FAMILIES = ("MiniMaxAI__MiniMax-H3", "krea__Krea-2-Turbo", "Lightricks__LTX-2.5")


def real_files(*patterns: str) -> list[Path]:
    """Files of the models that are supported, as they were published."""
    return [
        path
        for pattern in patterns
        for path in sorted(PUBLISHED.glob(pattern))
        if not path.relative_to(PUBLISHED).parts[0].endswith("__edited")
        and path.relative_to(PUBLISHED).parts[0] not in OTHER_FAMILIES
        and "second" not in path.parts
    ]


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def class_name(config: dict[str, Any]) -> str:
    return str(config.get("_class_name") or next(iter(config.get("architectures", [])), None))


@needs_published
def test_no_published_model_is_refused() -> None:
    configs = real_files("*/*/config.json", "*/config.json", "*/scheduler/scheduler_config.json")
    without_effect = set()
    for path in configs:
        config = read(path)
        removed = set(config) - set(clean_config(config, class_name(config), path))
        without_effect |= {(class_name(config), name) for name in removed}
    for path in real_files("*/tokenizer*/tokenizer_config.json"):
        check_tokenizer(read(path), path)
    for path in real_files("*/scheduler/scheduler_config.json"):
        check_scheduler(read(path), path)
    known = {
        pipeline: {spec.name for spec in family.components}
        for family in load_families()
        for pipeline in (*family.card.pipeline_classes, "LTXConditionPipeline")
    }
    for path in real_files("*/model_index.json"):
        check_index(read(path), known[read(path)["_class_name"]], path)
    assert len(configs) > 80
    assert without_effect == set(NO_EFFECT)  # a key that no published model has needs no exception


ENCODER = {"model_type": "umt5", "architectures": ["UMT5EncoderModel"], "d_model": 8}
GEMMA = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}


@pytest.mark.parametrize(
    ("config", "owner", "keys"),
    [
        (
            {"_class_name": "QwenImageTransformer2DModel", "zero_cond_tt": True},
            "QwenImageTransformer2DModel",
            ["zero_cond_tt"],
        ),
        (
            {"_class_name": "WanTransformer3DModel", "shiny": None, "dull": 1},
            "WanTransformer3DModel",
            ["dull", "shiny"],
        ),
        ({"_class_name": "LTX2TextConnectors", "shiny": 1}, "LTX2TextConnectors", ["shiny"]),
        ({"_class_name": "FlowMatchEulerDiscreteScheduler", "shiny": 1}, "FlowMatchEulerDiscreteScheduler", ["shiny"]),
        ({**ENCODER, "shiny": 1}, "UMT5Config", ["shiny"]),
        ({**GEMMA, "text_config": {**GEMMA["text_config"], "shiny": 1}}, "text_config", ["shiny"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_unknown_key_stops_with_both_ways_on(config: dict[str, Any], owner: str, keys: list[str]) -> None:
    ways = rf"upgrade: .* install .*(diffusers|transformers), or add .*--ignore-config-key {keys[-1]} to go on"
    with pytest.raises(UnsupportedError, match=f"x.json has {', '.join(keys)}, which {owner} of .*{ways}"):
        clean_config(config, class_name(config), "x.json")
    assert set(clean_config(config, class_name(config), "x.json", keys)) == set(config) - set(keys)


def test_the_version_that_wrote_a_configuration_does_not_matter() -> None:
    config = {"_class_name": "WanTransformer3DModel", "_diffusers_version": "9.0.0", "num_layers": 2}
    assert clean_config(config, "WanTransformer3DModel", "x.json") == config


@pytest.mark.parametrize(
    "config", [{"_class_name": "AutoencoderKLFlux2", "latent_channels": "many"}, {**ENCODER, "d_model": "many"}]
)
def test_a_value_of_another_type_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="many"):
        clean_config(config, class_name(config), "x.json")


def test_an_encoder_without_a_model_type_is_checked_as_its_class() -> None:
    config = {"d_model": 8, "shiny": 1}
    with pytest.raises(UnsupportedError, match="x.json has shiny, which UMT5Config of transformers .*shiny to go on"):
        clean_config(config, "UMT5EncoderModel", "x.json")
    assert clean_config(config, "UMT5EncoderModel", "x.json", ["shiny"]) == {"d_model": 8}


@pytest.mark.parametrize("name", [None, "ShinyScheduler", "FluxTransformer2DModel"])
def test_a_scheduler_that_diffusers_does_not_know_stops_with_both_ways_on(name: str | None) -> None:
    config = {"_class_name": name, "shiny": 1}
    ways = "upgrade: .* install .*diffusers, or add --ignore-config-key _class_name to go on"
    with pytest.raises(UnsupportedError, match=f"x.json has _class_name={name!r}, expected a scheduler .*; {ways}"):
        check_scheduler(config, "x.json")
    check_scheduler(config, "x.json", ["_class_name"])
    check_scheduler({}, "x.json")


@needs_published
def test_transformers_does_not_warn_of_keys_that_are_known(caplog: pytest.LogCaptureFixture) -> None:
    path = PUBLISHED / "Qwen__Qwen-Image" / "text_encoder" / "config.json"
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        clean_config(read(path), "Qwen2_5_VLForConditionalGeneration", path)
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.messages == []


def test_a_library_that_cannot_be_imported_is_explained_by_its_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """As diffusers does it beside a torchvision of another torch."""

    def fail(library: object, name: str) -> None:
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as error:
            raise RuntimeError(f"Failed to import {name}: Could not import module") from error

    monkeypatch.setattr(type(diffusers), "__getattr__", fail)
    expected = "^ShinyModel of diffusers cannot be imported here .RuntimeError: operator torchvision::nms .*; mend that"
    with pytest.raises(UnsupportedError, match=expected):
        clean_config({"num_layers": 2}, "ShinyModel", "x.json")


def test_classes_that_transformers_does_not_know_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="model_type='umt9', which transformers .* does not know; upgrade"):
        clean_config({**ENCODER, "model_type": "umt9"}, "UMT9EncoderModel", "x.json")
    with pytest.raises(UnsupportedError, match="tokenizer Qwen9Tokenizer, which transformers .* does not know"):
        check_tokenizer({"tokenizer_class": "Qwen9Tokenizer"}, "x.json")
    check_tokenizer({}, "x.json")


def test_values_and_components_of_an_index() -> None:
    index = {
        "_class_name": "WanPipeline",
        "boundary_ratio": None,
        "expand_timesteps": True,
        "image_encoder": [None, None],
        "prompt_enhancer": ["transformers", "Gemma3ForCausalLM"],
        "requires_safety_checker": False,
        "transformer": ["diffusers", "WanTransformer3DModel"],
    }
    check_index(index, ("transformer",), "x.json")
    parts = ("transformer_2", "text_encoder_2", "image_encoder", "vae_2", "connectors")
    for more in ({"time_travel": True}, *({part: ["diffusers", "Shiny"]} for part in parts)):
        (name,) = more
        with pytest.raises(UnsupportedError, match=f"has {name}, .* for a WanPipeline, .*--ignore-config-key {name} "):
            check_index({**index, **more}, ("transformer",), "x.json")
        check_index({**index, **more}, ("transformer",), "x.json", (name,))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("boundary_ratio", "x", "a number"), ("expand_timesteps", 1, "true or false"), ("is_distilled", [], "true or")],
)
def test_a_value_of_an_index_has_its_type(name: str, value: Any, expected: str) -> None:
    with pytest.raises(CheckpointError, match=f"^x.json has {name}=.*, expected {expected}.*; download"):
        check_index({"_class_name": "WanPipeline", name: value}, (), "x.json")
