"""Makes the settings of full pipeline nodes from what their widgets start with, over the stand-in for ComfyUI.

    python tests/comfy_pack/run_defaults.py

prints one JSON object: the settings, and what the node says of them, by hub id.
"""

import dataclasses
import json
import logging
import sys
import types
from pathlib import Path

import fake_comfyui  # beside this file

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.registry import family_cards
from comfy_tpu.families.settings import make_settings
from tests.published_models import published_files

NAMES = {field.name for field in dataclasses.fields(GenerationSettings)}


class Stages:
    """What a node asks a pipeline for its settings."""

    def __init__(self, hub_id):
        files = published_files(hub_id)
        self.card, self.defaults, self.model_name = files.family.card, files.defaults, hub_id
        self.has_two_transformers = self.card.transformer_count == 2
        self.preset = types.SimpleNamespace(settings={})

    def settings(self, **chosen):
        return make_settings(self.defaults, chosen, self.card.limits)

    def warn_of_preset(self, settings):
        pass


def run():
    from comfy_tpu.comfy import family_nodes  # which imports ComfyUI

    notes, found = [], {}
    family_nodes.show_note = lambda pipeline, note: notes.append(str(note))
    for nodes in (nodes for card in family_cards() for nodes in card.node_sets):
        *_, pipeline_node = family_nodes.make_nodes(nodes)
        inputs = pipeline_node.define_schema().declared["inputs"]
        widgets = {each["id"]: each.get("default") for each in inputs if each["id"] in NAMES}
        for hub_id in nodes.hub_models[: 1 if nodes.keeps_numbers else None]:
            notes.clear()
            settings = family_nodes._make_settings(Stages(hub_id), **widgets)
            found[hub_id] = {"settings": dataclasses.asdict(settings), "notes": list(notes)}
    return found


if __name__ == "__main__":
    logging.disable()
    fake_comfyui.install(Path.cwd())
    sys.stdout.write(json.dumps(run()) + "\n")
