"""The facts of a node set's card, as values for placeholders and as conditions on notes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from comfy_tpu.families.card import ModelCard, NodeSet
from tools.pages.sources import Json, PageError

KINDS = ("TextEncoder", "ImageEncoder", "VideoEncoder", "TPUSampler", "TPUVAEDecoder", "TPUPipeline")
"""The suffixes of the ids of a family's nodes."""

_CONDITIONS: Mapping[str, Callable[[NodeSet], bool]] = {
    "video": lambda nodes: not nodes.makes_images,
    "image": lambda nodes: nodes.makes_images,
    "negative_prompt": lambda nodes: nodes.has_negative_prompt,
    "without_guidance": lambda nodes: any(model.guidance == "none" for model in nodes.models),
    "two_transformers": lambda nodes: nodes.has_second_guidance,
    "fps_not_read": lambda nodes: not nodes.reads_fps,
    "first_frame": lambda nodes: nodes.image_role == "first_frame",
    "reference": lambda nodes: nodes.image_role == "reference",
    "initial": lambda nodes: nodes.image_role == "initial",
    "image_encoder": lambda nodes: nodes.has_image_encoder,
    "video_encoder": lambda nodes: nodes.has_video_encoder,
    "frames_multiple": lambda nodes: nodes.limits.frames_multiple > 1 and not nodes.makes_images,
    "starts_from_video": lambda nodes: nodes.starts_from_video,
    "stretch": lambda nodes: nodes.image_role == "first_frame" and not nodes.crops_images,
    "crop": lambda nodes: nodes.crops_images,
    "last_image": lambda nodes: nodes.has_last_image,
    "last_image_required": lambda nodes: any(image.last_image == "required" for image in nodes.image_inputs),
    "image_required": lambda nodes: any(image.required for image in nodes.image_inputs),
    "text_only_models": lambda nodes: len(nodes.image_inputs) < len(nodes.models),
}


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts of one node set, in one language."""

    nodes: NodeSet
    help: Json
    """locales/<language>/help.json."""
    definitions: Json
    """locales/<language>/nodeDefs.json."""
    language: str

    def holds(self, conditions: list[str]) -> bool:
        """Whether all conditions are true of the node set."""
        for condition in conditions:
            if condition not in _CONDITIONS:
                raise PageError(
                    f"locales/{self.language}/help.json has the condition {condition!r}; choose from "
                    f"{', '.join(_CONDITIONS)}"
                )
        return all(_CONDITIONS[condition](self.nodes) for condition in conditions)

    def values(self) -> dict[str, Any]:
        """By the placeholders' names."""
        nodes, form = self.nodes, self.help["format"]
        step, frames = nodes.limits.frames_multiple, nodes.defaults.num_frames
        noun = "image" if nodes.makes_images else "video"
        return {
            "name": nodes.name,
            "noun": form["nouns"][noun],
            "noun_in_message": noun,
            "model": nodes.hub_models[0],
            "tokens": max(model.defaults.max_sequence_length for model in nodes.models),
            "frames_multiple": step,
            "frames_wrong": frames - 1,
            "frames_below": frames - step,
            "frames_above": frames,
            "max_images": max((image.max_images for image in nodes.image_inputs), default=0),
            "image_models": form["list"].join(self.model_name(model) for model in nodes.models if model.image),
            "sampler": self.display_name("TPUSampler"),
            "decoder": self.display_name("TPUVAEDecoder"),
        }

    def fill(self, text: str, /, **more: Any) -> str:
        """The text with its placeholders replaced."""
        values = self.values() | more
        try:
            return text.format_map(values)
        except (KeyError, ValueError, IndexError) as error:
            raise PageError(
                f"locales/{self.language}/help.json has the placeholder {error} in {text!r}; choose from "
                f"{', '.join(values)}"
            ) from error

    def display_name(self, kind: str) -> str:
        name: str = self.definition(f"{self.nodes.key}{kind}")["display_name"]
        return name

    def definition(self, node_id: str) -> Json:
        """The node's entry in nodeDefs.json."""
        if node_id not in self.definitions:
            raise PageError(
                f"locales/{self.language}/nodeDefs.json has no {node_id}, which the card of {self.nodes.name} makes; "
                "add its names and tooltips there, then run make pages"
            )
        entry: Json = self.definitions[node_id]
        return entry

    def text_of(self, node_id: str, part: str, name: str) -> Json:
        """Name and tooltip of one of a node's `inputs` or `outputs`."""
        entries = self.definition(node_id)[part]
        if name not in entries:
            raise PageError(
                f"locales/{self.language}/nodeDefs.json has no {part} {name} of {node_id}; add its name and tooltip "
                "there, then run make pages"
            )
        entry: Json = entries[name]
        return entry

    def model_name(self, model: ModelCard) -> str:
        name: str = self.help["models"].get(model.name, model.name)
        return name

    def by_model(self, name: str) -> str:
        """A sentence with the values of a setting by model; empty where all models have the same."""
        if name in ("height", "width"):
            return self._grouped("multiple_for_models", [(m, m.limits.size_multiple) for m in self.nodes.models])
        if name not in ("num_frames", "num_inference_steps", "guidance_scale"):
            return ""
        reading = [m for m in self.nodes.models if name != "guidance_scale" or m.guidance != "none"]
        return self._grouped("value_for_models", [(m, getattr(m.defaults, name)) for m in reading])

    def _grouped(self, wording: str, values: list[tuple[ModelCard, Any]]) -> str:
        form = self.help["format"]
        groups: dict[Any, list[str]] = {}
        for model, value in values:
            groups.setdefault(value, []).append(self.model_name(model))
        if len(groups) < 2:
            return ""
        parts = [form[wording].format(value=value, models=form["list"].join(names)) for value, names in groups.items()]
        return str(form["by_model"]).format(list="; ".join(parts) if self.language == "en" else "；".join(parts))
