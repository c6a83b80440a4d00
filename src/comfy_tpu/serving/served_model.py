"""A model that a server has: its card, its defaults, and the settings that a request chooses."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import ModelCard, Preset
from comfy_tpu.families.presets import AUTO, recognise_file
from comfy_tpu.families.settings import make_settings
from comfy_tpu.jobs.opening import choose_settings
from comfy_tpu.jobs.request import split_lora
from comfy_tpu.jobs.served_ledger import Kind
from comfy_tpu.pipeline.checks import check_context, check_tiled_media
from comfy_tpu.pipeline.given_media import NO_MEDIA, GivenMedia
from comfy_tpu.pipeline.initial import first_step
from comfy_tpu.pipeline.second_pass import check_second_pass, read_second_pass

if TYPE_CHECKING:
    from comfy_tpu.pipeline.model_files import ModelFiles


@dataclasses.dataclass(frozen=True)
class ServedModel:
    name: str
    card: ModelCard
    defaults: GenerationSettings
    files: ModelFiles | None = None

    @property
    def kind(self) -> Kind:
        return "image" if self.card.makes_images else "video"

    @property
    def presets(self) -> Mapping[str, Preset]:
        return self.card.presets if self.files is None else self.files.presets

    def chosen_settings(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that a request chooses: its own, those of its preset and of its size."""
        size = values.get("size")
        sizes = self.card.sizes if size is None else {size: {}, **self.card.sizes}  # a server before took others
        return choose_settings(values, sizes, self._preset_settings(values))

    def passes(self, values: Mapping[str, Any], given: GivenMedia = NO_MEDIA) -> tuple[GenerationSettings, ...]:
        """The settings of each denoising of a request, with the number of steps that it runs. Raises
        InvalidValueError for values and media that the model does not take together."""
        first = make_settings(self.defaults, self.chosen_settings(values), self.card.limits)
        check_context(self.card, self.name, first)
        check_tiled_media(self.card, self.name, first, given)
        second = read_second_pass(values)
        if second is None:
            return (first,)
        larger = check_second_pass(self.card, self.name, first, second, given)
        count = larger.num_inference_steps
        count -= first_step(self.card, count, second.strength)
        return first, dataclasses.replace(larger, num_inference_steps=count, sigmas="")

    def _preset_settings(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """The settings of a request's preset. "auto" is decided by the names of its LoRAs; what the model itself was
        made for is known when its pipeline is opened."""
        name = values.get("preset")
        if name == AUTO:
            paths = (Path(split_lora(each)[0]) for each in values.get("lora", ()))
            name = next(filter(None, (recognise_file(path, {}, self.presets) for path in paths)), None)
        preset = None if name is None else self.presets.get(name)
        return {} if preset is None else preset.settings


def open_served_model(name: str, ignored_keys: Collection[str] = ()) -> ServedModel:
    """Finds a model, and downloads it if needed."""
    from comfy_tpu.pipeline.model_files import ModelFiles

    files = ModelFiles.open(name, ignored_keys=ignored_keys)
    return ServedModel(name, files.family.card, files.defaults, files)
