"""TPU Load LoRA: LoRA files for the nodes that run models of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import folder_paths
from comfy_api.latest import io

from comfy_tpu.comfy.inputs import LORA_TYPE, check_loras
from comfy_tpu.config import Lora, LoraNoise
from comfy_tpu.families.registry import family_cards

_FOLDER = "loras"


class TPULoraLoader(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TPULoraLoader",
            display_name="TPU Load LoRA",
            category="TPU",
            description="A LoRA for the TPU samplers and full pipelines. Several go one after the other.",
            inputs=[
                io.Combo.Input(
                    "lora_name",
                    options=[name for name in folder_paths.get_filename_list(_FOLDER) if name.endswith(".safetensors")],
                    tooltip="A safetensors file in ComfyUI's models/loras, of any trainer.",
                ),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=-100.0,
                    max=100.0,
                    step=0.01,
                    tooltip="How much of it is added to the model. 0 is none; below 0 takes away.",
                ),
                LORA_TYPE.Input(
                    "previous_lora", optional=True, tooltip="From another TPU Load LoRA: both are then in the model."
                ),
                io.Combo.Input(
                    "noise",
                    options=list(get_args(LoraNoise)),
                    default="all",
                    optional=True,
                    tooltip=f"For {_two_transformer_sets()}, which has two transformers: both, or the one for high "
                    "or for low noise; auto: as the file's name says.",
                ),
            ],
            outputs=[
                LORA_TYPE.Output("lora", tooltip="For the lora input of a sampler, or for the next TPU Load LoRA.")
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, lora_name: str | None = None, **_: Any) -> str:
        """A fingerprint of the file's content: a file may be replaced under the same name. Empty for a name from a
        link."""
        path = folder_paths.get_full_path(_FOLDER, lora_name) if lora_name else None
        if path is None:
            return ""
        status = Path(path).stat()
        return f"{status.st_size} {status.st_mtime_ns}"

    @classmethod
    def execute(
        cls, lora_name: str, strength: float, previous_lora: Any = None, noise: LoraNoise = "all"
    ) -> io.NodeOutput:
        path = Path(folder_paths.get_full_path_or_raise(_FOLDER, lora_name))
        return io.NodeOutput((*check_loras(previous_lora), Lora(path, strength, noise)))


def _two_transformer_sets() -> str:
    """The names of the node sets with two transformers: "Wan 2.2"."""
    sets = (nodes for card in family_cards() for nodes in card.node_sets)
    return " and ".join(nodes.name for nodes in sets if nodes.has_second_guidance)
