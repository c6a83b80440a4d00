"""The table of models in README and the ComfyUI guide, between two marker lines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from comfy_tpu.families.card import FamilyCard, ImageInput, ModelCard, VideoInput
from comfy_tpu.hub.sizes import read_parameters
from tools.pages.parameters import format_size
from tools.pages.sources import Json, PageError

BEGIN = "<!-- models: generated from the family cards by `make pages` -->"
END = "<!-- end of models -->"


def model_table(cards: Iterable[FamilyCard], texts: Json) -> str:
    """`texts`: locales/<language>/help.json."""
    words, parameters = texts["tables"], read_parameters()
    lines = [format_row(words["columns"]), format_row("---" for _ in words["columns"]).replace(" ", "")]
    for card in cards:
        for nodes in card.node_sets:
            for model in nodes.models:
                cells = [texts["models"].get(model.name, model.name), "<br>".join(f"`{id}`" for id in model.published)]
                cells.append(
                    "<br>".join(format_size(parameters[id]) if id in parameters else "" for id in model.published)
                )
                cells += [_defaults(model, words), _given(model, words), _guidance(model, words)]
                lines.append(format_row([*cells, words["nodes"].format(key=nodes.key)]))
    return "\n".join(lines)


def replace_table(page: str, name: str, table: str) -> str:
    """The page with the table between its markers. `name`: the page's path, for the error."""
    return replace_between(page, name, table, BEGIN, END)


def replace_between(page: str, name: str, table: str, first: str, last: str) -> str:
    """The page with the table between these two lines."""
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise PageError(f"{name} has no lines {first} and {last}; put them where the table belongs")
    return f"{before}{first}\n\n{table}\n\n{last}{after}"


def format_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _defaults(model: ModelCard, words: Json) -> str:
    """Of each hub id, where they differ."""
    wording = words["defaults_image" if model.makes_images else "defaults"]
    found = {}
    for own in map(model.defaults_of, model.published):
        size = words["size"].format(width=own.width, height=own.height)
        found[wording.format(size=size, frames=own.num_frames, steps=own.num_inference_steps)] = None
    return "<br>".join(found)


def _given(model: ModelCard, words: Json) -> str:
    """The images and videos that a model takes."""
    kinds = words["images"]
    taken = [] if model.image is None else [_images(model.image, bool(model.videos), kinds)]
    if model.max_references:
        taken.append(kinds["reference"].format(max_images=model.max_references))
    for wording, required in (("videos_required", True), ("videos", False)):
        videos = [_video(video, words) for video in model.videos if video.required == required]
        if videos:
            taken.append(words[wording].format(list=words["and"].join(videos)))
    return "<br>".join(taken) or str(kinds["none"])


def _video(video: VideoInput, words: Json) -> str:
    names = words["video_names"]
    return str(names["initial"] if video.role == "initial" else names[video.name])


def _images(image: ImageInput, is_beside_videos: bool, kinds: Json) -> str:
    if image.role == "reference" and image.required:
        if is_beside_videos:
            return str(kinds["reference_beside_videos"])
        return str(kinds["references_required" if image.max_images > 1 else "reference_required"]).format(
            max_images=image.max_images
        )
    if image.role != "first_frame":
        return str(kinds[image.role].format(max_images=image.max_images))
    if image.last_image == "no":
        return str(kinds["first_frame_required" if image.required else "first_frame"])
    if image.last_image == "required":
        return str(kinds["first_and_last_frame_required"])
    return str(kinds["first_and_last_frame" if image.required else "first_and_last_frame_optional"])


def _guidance(model: ModelCard, words: Json) -> str:
    value: Any = f"{model.defaults.guidance_scale:g}"
    if model.transformer_count == 2 and model.defaults.guidance_scale_2:
        value += f" / {model.defaults.guidance_scale_2:g}"
    return str(words["guidance"][model.guidance].format(value=value))
