"""TPU Load Pipeline: the model of a graph, chosen once, from single files or as a model directory or hub id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import folder_paths
from comfy_api.latest import io

from comfy_tpu.comfy.inputs import PIPELINE_TYPE
from comfy_tpu.comfy.models import all_model_choices, check_single_files, local_directory
from comfy_tpu.config import SingleFiles
from comfy_tpu.errors import InvalidValueError

AUTO, NONE = "auto", "none"
_FOLDERS = {
    "transformer": ("diffusion_models", "checkpoints"),
    "text_encoder": ("text_encoders",),
    "vae": ("vae", "checkpoints"),
    "transformer_2": ("diffusion_models",),
    "text_encoder_2": ("text_encoders",),
    "image_encoder": ("clip_vision",),
}
"""ComfyUI's model folders of each input. A file in checkpoints holds transformer and VAE."""
_SUFFIXES = (".safetensors", ".sft")
_TOOLTIPS = {
    "transformer": "The diffusion model, under its authors' or diffusers' names: one safetensors file; none for a "
    "whole model of base_model.",
    "text_encoder": "A text encoder of the model.",
    "vae": "The VAE of the model.",
    "transformer_2": "The file for low noise of a model with two transformers; the one for high noise is transformer.",
    "text_encoder_2": "The second text encoder of a model that has two, in either order.",
    "image_encoder": "The CLIP or SigLIP vision file, for models that read their first frame with one.",
}


class TPULoadPipeline(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        base = io.Combo.Input(
            "base_model",
            options=[AUTO, *all_model_choices()],
            default=AUTO,
            tooltip="The model that the files belong to: configurations and tokenizers, which files lack, come from "
            "it. auto finds it by the transformer's shapes. Without files, the model itself.",
        )
        names = list(_FOLDERS)
        return io.Schema(
            node_id="TPULoadPipeline",
            display_name="TPU Load Pipeline",
            category="TPU",
            description="The model of encoder, sampler and decoder, chosen once: single files, or a whole model.",
            inputs=[
                *(_file_input(name) for name in names[:3]),
                base,
                *(_file_input(name, optional=True) for name in names[3:]),
            ],
            outputs=[
                PIPELINE_TYPE.Output("pipeline", tooltip="For the pipeline input of every TPU node of the graph.")
            ],
        )

    @classmethod
    def validate_inputs(
        cls,
        transformer: str | None = None,
        text_encoder: str | None = None,
        vae: str | None = None,
        transformer_2: str | None = None,
        text_encoder_2: str | None = None,
        image_encoder: str | None = None,
    ) -> bool | str:
        given = {
            "transformer": transformer,
            "text_encoder": text_encoder,
            "vae": vae,
            "transformer_2": transformer_2,
            "text_encoder_2": text_encoder_2,
            "image_encoder": image_encoder,
        }
        problems = (_file_problem(name, chosen) for name, chosen in given.items() if chosen not in (None, NONE))
        return next((problem for problem in problems if problem), True)

    @classmethod
    def fingerprint_inputs(cls, **chosen: Any) -> str:
        """Sizes and times of the files: one may be replaced under the same name."""
        paths = [_find_file(name, chosen.get(name) or "") for name in _FOLDERS]
        states = [Path(path).stat() for path in paths if path is not None]
        return " ".join(f"{state.st_size} {state.st_mtime_ns}" for state in states)

    @classmethod
    def execute(cls, base_model: str, **chosen: Any) -> io.NodeOutput:
        files = {name: _find_file_or_raise(name, chosen[name]) for name in _FOLDERS if chosen.get(name, NONE) != NONE}
        if not files:
            if base_model == AUTO:
                raise InvalidValueError(
                    "no file is chosen; choose a transformer, text encoder and vae, or a base_model",
                    field="transformer",
                )
            return io.NodeOutput(base_model)
        if missing := [name for name in ("transformer", "text_encoder", "vae") if name not in files]:
            raise InvalidValueError(f"{missing[0]} is none; choose its file, or none for all of them", field=missing[0])
        given = SingleFiles(
            tuple(files[name] for name in ("transformer", "transformer_2") if name in files),
            tuple(files[name] for name in ("text_encoder", "text_encoder_2") if name in files),
            files["vae"],
            files.get("image_encoder"),
            None if base_model == AUTO else local_directory(base_model),
        )
        check_single_files(given)
        return io.NodeOutput(given)


def _file_input(name: str, *, optional: bool = False) -> io.Input:
    files = dict.fromkeys(file for folder in _FOLDERS[name] for file in folder_paths.get_filename_list(folder))
    return io.Combo.Input(
        name,
        options=[NONE, *files],
        default=NONE,
        optional=optional,
        tooltip=f"{_TOOLTIPS[name]} In ComfyUI's {_folder_names(name)}.",
    )


def _folder_names(name: str) -> str:
    return " or ".join(f"models/{folder}" for folder in _FOLDERS[name])


def _find_file(name: str, chosen: str) -> str | None:
    """The path of an input's file, in the first of its folders that holds it."""
    found = (folder_paths.get_full_path(folder, chosen) for folder in _FOLDERS[name])
    return next((path for path in found if path is not None), None)


def _find_file_or_raise(name: str, chosen: str) -> Path:
    path = _find_file(name, chosen)
    if path is None:
        raise InvalidValueError(_absence(name, chosen), field=name)
    return Path(path)


def _absence(name: str, chosen: str) -> str:
    return f"{name}={chosen} is not in ComfyUI's {_folder_names(name)}; choose one of its files"


def _file_problem(name: str, chosen: str | None) -> str | None:
    """The problem with a chosen file as a sentence, or None."""
    if not isinstance(chosen, str):
        return None
    if chosen.endswith(".gguf"):
        return f"{name}={chosen} is a GGUF file, which is not read here; use the model's safetensors file"
    if not chosen.endswith(_SUFFIXES):
        return f"{name}={chosen} is not a safetensors file, and may run code when it is opened; use that version of it"
    if _find_file(name, chosen) is None:
        return _absence(name, chosen)
    return None
