"""docs/defaults.md is right: what it says of diffusers, and that nodes, command, server and Python use what it says."""

import argparse
import dataclasses
import json
import types
from pathlib import Path

import pytest

from comfy_tpu.cli import options, session
from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.facade.pipeline import Pipeline
from comfy_tpu.families.registry import model_cards
from comfy_tpu.families.settings import check_settings, make_settings
from comfy_tpu.serving.config import ServeConfig
from comfy_tpu.serving.orders import make_request
from comfy_tpu.serving.served_model import ServedModel
from tests.comfy_pack.loading import ROOT, run_script
from tests.published_models import published_files
from tools.pages.defaults_page import compare, our_value, read_data, read_signatures

PUBLISHED = ROOT.parent / "shared" / "published"
HUB_IDS = [hub_id for card in model_cards() for hub_id in card.published]
DATA = read_data()


def test_the_signatures_of_diffusers_are_as_recorded():
    assert read_signatures(DATA) == DATA["diffusers"]


@pytest.mark.parametrize("hub_id", HUB_IDS)
def test_the_shift_of_the_published_scheduler_is_as_recorded(hub_id):
    path = PUBLISHED / hub_id.replace("/", "__") / "scheduler" / "scheduler_config.json"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    config = json.loads(path.read_text())
    if not config.get("use_dynamic_shifting"):  # else it grows with the size
        shift = config.get("flow_shift", config.get("shift"))
        assert DATA["models"][hub_id]["diffusers"].get("flow_shift", 1.0) == shift


def from_command(files, arguments=()):
    parser = argparse.ArgumentParser()
    options.add_settings(parser)
    chosen = parser.parse_args(arguments)
    return session._choose_settings(chosen, files.family.card, files.presets, files.defaults, files.name)


def from_server(files, body=()):
    model = ServedModel(files.name, files.family.card, files.defaults, files)
    request = make_request(
        {"model": files.name, "prompt": "a cat", **dict(body)},
        ServeConfig((files.name,), Path()),
        model.card,
        model.defaults,
    )
    return model.passes(request.values)[0]


def from_python(files, **chosen):
    card = files.family.card
    stages = types.SimpleNamespace(settings=lambda **given: make_settings(files.defaults, given, card.limits))
    return Pipeline(stages).settings(**chosen)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    return run_script("run_defaults.py", directory=tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("hub_id", HUB_IDS)
def test_nodes_command_server_and_python_use_the_values_of_the_table(hub_id, nodes):
    files = published_files(hub_id)
    card = files.family.card
    found = [
        from_command(files),
        from_command(files, ["--negative-prompt", "", "--steps", "", "--scheduler", ""]),
        from_server(files),
        from_server(files, {"negative_prompt": "", "num_inference_steps": "", "size": "auto"}),
        from_python(files),
        from_python(files, negative_prompt="", height=None),
    ]
    if hub_id in nodes:
        found.append(GenerationSettings(**nodes[hub_id]["settings"]))
    assert found == [found[0]] * len(found)
    for field, ours, *_ in compare(card, hub_id, DATA):
        assert ours == our_value(dataclasses.replace(card, defaults=found[0], own_defaults={}), hub_id, field), field


def test_every_published_model_is_in_the_table_and_at_a_node(nodes):
    assert sorted(DATA["models"]) == sorted(HUB_IDS)
    wan21 = {hub_id for card in model_cards() if card.name.startswith("Wan 2.1") for hub_id in card.published}
    assert set(HUB_IDS) - set(nodes) <= wan21  # whose nodes keep the numbers of the first model


def test_a_node_says_what_it_took(nodes):
    (note,) = nodes["Wan-AI/Wan2.2-I2V-A14B-Diffusers"]["notes"]
    assert note.startswith("the model's own: 40 steps, ")
    assert "guidance_scale 3.5, guidance_scale_2 3.5, flow_shift 5" in note


def test_the_value_of_a_widget_for_the_model_s_own_is_no_value_of_the_setting():
    """So that a number of a saved workflow never means it."""
    own = {"height": 0, "width": 0, "num_frames": 0, "num_inference_steps": 0, "flow_shift": 0.0, "fps": 0}
    own |= dict.fromkeys(("guidance_scale", "guidance_scale_2", "cfg_normalization", "stg_scale", "stg_block"), -1)
    own |= dict.fromkeys(("modality_scale", "guidance_rescale", "audio_guidance_scale", "audio_stg_scale"), -1)
    own |= dict.fromkeys(("audio_modality_scale", "audio_guidance_rescale"), -1)
    for card in model_cards():
        for name, value in own.items():
            with pytest.raises(InvalidValueError, match=name):
                check_settings(dataclasses.replace(card.defaults, **{name: value}), card.limits)


@pytest.mark.parametrize("workflow", sorted((ROOT / "example_workflows").glob("*.json")), ids=lambda path: path.stem)
def test_a_saved_workflow_keeps_its_numbers(workflow: Path, tmp_path):
    """Values in workflows are in the order of the widgets: each is still one of the widget's."""
    record = json.loads((ROOT / "tests/comfy_pack/golden_nodes.json").read_text())
    for node in json.loads(workflow.read_text())["nodes"]:
        widgets = [
            each
            for each in record.get(node["type"], {}).get("inputs", ())
            if each["type"] in ("INT", "FLOAT", "STRING", "COMBO")
        ]
        values = iter(node.get("widgets_values", ()))
        for widget in widgets:
            value = next(values)
            if widget["type"] in ("INT", "FLOAT"):
                assert widget["min"] <= value <= widget["max"], (node["type"], widget["id"])
            if widget["id"] == "seed":
                assert isinstance(next(values), str)  # control after generate
        assert not widgets or next(values, None) is None
