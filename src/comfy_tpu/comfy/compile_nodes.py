"""ComfyUI's own MODEL, VAE and CLIP on the TPU, by one node each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import folder_paths
from comfy_api.latest import io

from comfy_tpu.comfy import inputs
from comfy_tpu.config import AttentionImplementation

if TYPE_CHECKING:
    from comfy_tpu.comfy.native.hosting import Choices

CATEGORY = "TPU"
PRECISIONS = ["auto", "bfloat16", "float32"]
MESHES = ["auto", "single", "seed"]


def _choices() -> list[io.Input]:
    return [
        io.Combo.Input(
            "mesh",
            options=MESHES,
            default="auto",
            tooltip="How the work is split over the chips. auto chooses; single uses one; seed is dp=2 × tp=4, "
            "for 8 chips.",
        ),
        io.Combo.Input(
            "precision",
            options=PRECISIONS,
            default="auto",
            tooltip="What is computed in. auto: bfloat16 on TPU and GPU, float32 on a CPU.",
        ),
        io.Combo.Input(
            "attention",
            options=list(get_args(AttentionImplementation)),
            default="auto",
            tooltip="The attention kernel. auto: splash on TPU for long sequences, hopper or cuDNN on GPU, chunked "
            "otherwise.",
        ),
        inputs.options(" Its mesh, dtype and attention are used instead of the inputs here."),
    ]


def _read(widgets: dict[str, Any], options: Any) -> Choices:
    from comfy_tpu.comfy.native.hosting import make_choices

    return make_choices(widgets, None if options is None else inputs.check_options(options))


class TPUCompileModel(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TPUCompileModel",
            display_name="TPU Compile Model",
            category=CATEGORY,
            description="Any diffusion model of ComfyUI on the TPU, with any sampler, LoRA, guider or cache around.",
            inputs=[
                io.Model.Input("model", tooltip="From any loader, with LoRA and patches applied or not."),
                *_choices(),
            ],
            outputs=[
                io.Model.Output("model_out", display_name="model", tooltip="The same model, computing on the TPU.")
            ],
        )

    @classmethod
    def execute(cls, model: Any, options: Any = None, **choices: str) -> io.NodeOutput:
        from comfy_tpu.comfy.native.model import compile_model

        return io.NodeOutput(compile_model(model, _read(choices, options)))


class TPUCompileVAE(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TPUCompileVAE",
            display_name="TPU Compile VAE",
            category=CATEGORY,
            description="Decoding and encoding of any VAE of ComfyUI on the TPU, whole or in tiles.",
            inputs=[io.Vae.Input("vae", tooltip="From any loader."), *_choices()],
            outputs=[io.Vae.Output("vae_out", display_name="vae", tooltip="The same VAE, computing on the TPU.")],
        )

    @classmethod
    def execute(cls, vae: Any, options: Any = None, **choices: str) -> io.NodeOutput:
        from comfy_tpu.comfy.native.vae import compile_vae

        return io.NodeOutput(compile_vae(vae, _read(choices, options)))


class TPUCompileCLIP(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TPUCompileCLIP",
            display_name="TPU Compile CLIP",
            category=CATEGORY,
            description="Any text encoder of ComfyUI on the TPU.",
            inputs=[io.Clip.Input("clip", tooltip="From any loader."), *_choices()],
            outputs=[
                io.Clip.Output("clip_out", display_name="clip", tooltip="The same encoder, computing on the TPU.")
            ],
        )

    @classmethod
    def execute(cls, clip: Any, options: Any = None, **choices: str) -> io.NodeOutput:
        from comfy_tpu.comfy.native.clip import compile_clip

        return io.NodeOutput(compile_clip(clip, _read(choices, options)))


class TPULoadDiffusionModel(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TPULoadDiffusionModel",
            display_name="TPU Load Diffusion Model",
            category=CATEGORY,
            description="A diffusion model from one file straight to the TPU, without the float32 copy that ComfyUI "
            "makes of it with --cpu.",
            inputs=[
                io.Combo.Input(
                    "unet_name",
                    options=folder_paths.get_filename_list("diffusion_models"),
                    tooltip="A safetensors file in ComfyUI's models/diffusion_models.",
                ),
                *_choices(),
            ],
            outputs=[io.Model.Output("model", tooltip="The model, computing on the TPU.")],
        )

    @classmethod
    def execute(cls, unet_name: str, options: Any = None, **choices: str) -> io.NodeOutput:
        from comfy_tpu.comfy.native.loading import load_diffusion_model
        from comfy_tpu.comfy.native.model import compile_model

        path = Path(folder_paths.get_full_path_or_raise("diffusion_models", unet_name))
        return io.NodeOutput(compile_model(load_diffusion_model(path), _read(choices, options)))
