"""Wan 2.1 text-to-video: three stages as nodes, and all of them as one."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from comfy_api.latest import io

from comfy_tpu.comfy import inputs
from comfy_tpu.comfy.exchange import (
    Conditioning,
    Latent,
    from_conditioning,
    from_latent,
    to_conditioning,
    to_images,
    to_latent,
    to_video,
)
from comfy_tpu.comfy.run import pipeline_run

if TYPE_CHECKING:
    from comfy_tpu.config import GenerationSettings
    from comfy_tpu.pipeline.video import VideoPipeline

logger = logging.getLogger(__name__)

CATEGORY = "TPU/Wan2.1"


class Wan21TextEncoder(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Wan21TextEncoder",
            display_name="Wan 2.1 Text Encoder (TPU)",
            category=CATEGORY,
            description="Reads the prompt and the negative prompt with Wan's UMT5 encoder, on the device.",
            inputs=[inputs.prompt(), inputs.negative_prompt(), inputs.model_id()],
            outputs=[
                io.Conditioning.Output("prompt_embeds", tooltip="The prompt as the model reads it."),
                io.Conditioning.Output("negative_prompt_embeds", tooltip="The negative prompt as the model reads it."),
            ],
        )

    @classmethod
    def validate_inputs(cls, prompt: str | None = None) -> bool | str:
        return "it is empty; say what the video should show" if prompt is not None and not prompt.strip() else True

    @classmethod
    def execute(cls, prompt: str, negative_prompt: str, model_id: str) -> io.NodeOutput:
        with pipeline_run(model_id, {"encoding": 1}) as pipeline:
            # Over 1, so that the negative prompt is read too: whether it counts is the sampler's guidance_scale.
            embeddings = pipeline.encode(prompt, pipeline.settings(negative_prompt=negative_prompt, guidance_scale=2.0))
        _warn_of_cut(embeddings.cut)
        assert embeddings.negative is not None
        branches = (embeddings.positive, embeddings.negative)
        return io.NodeOutput(*(to_conditioning(branch["text"]) for branch in branches))


class Wan21TPUSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Wan21TPUSampler",
            display_name="Wan 2.1 TPU Sampler",
            category=CATEGORY,
            description="Denoises a video's latents from the prompt, on all chips.",
            inputs=[
                inputs.prompt_embeds(),
                inputs.negative_prompt_embeds(),
                *inputs.sampling(),
                inputs.model_id(),
                inputs.scheduler(),
                inputs.lora(),
            ],
            outputs=[
                io.Latent.Output("latents", tooltip="For Wan 2.1 TPU VAE Decoder, or for ComfyUI's own VAE Decode."),
                io.Int.Output("num_frames_out", display_name="num_frames", tooltip="Frames that the latents hold."),
            ],
        )

    @classmethod
    def validate_inputs(cls, num_frames: int | None = None) -> bool | str:
        return _check_frames(num_frames)

    @classmethod
    def execute(
        cls,
        prompt_embeds: Conditioning,
        negative_prompt_embeds: Conditioning,
        model_id: str,
        lora: Any = None,
        **chosen: Any,
    ) -> io.NodeOutput:
        inputs.check_whole(num_frames=chosen["num_frames"], num_inference_steps=chosen["num_inference_steps"])
        with pipeline_run(model_id, {"denoising": chosen["num_inference_steps"]}, inputs.check_loras(lora)) as pipeline:
            from comfy_tpu.pipeline.text import PromptEmbeddings

            settings = _settings(pipeline, **chosen)
            positive, negative = _branches(
                pipeline,
                settings,
                prompt_embeds=prompt_embeds,
                negative_prompt_embeds=negative_prompt_embeds,
            )
            latents = pipeline.denoise(PromptEmbeddings("", positive, negative), settings)
            return io.NodeOutput(to_latent(pipeline.to_vae_scale(latents)), settings.num_frames)


class Wan21TPUVAEDecoder(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Wan21TPUVAEDecoder",
            display_name="Wan 2.1 TPU VAE Decoder",
            category=CATEGORY,
            description="Decodes latents to frames, on all chips; in tiles where whole frames do not fit.",
            inputs=[inputs.latents(), inputs.fps(), inputs.model_id()],
            outputs=inputs.frame_outputs(),
        )

    @classmethod
    def execute(cls, latents: Latent, fps: int, model_id: str) -> io.NodeOutput:
        samples = from_latent("latents", latents)
        inputs.check_whole(fps=fps)
        with pipeline_run(model_id, {"decoding": samples.shape[2]}) as pipeline:
            settings = pipeline.latent_settings(samples, fps=fps)
            images = to_images(pipeline.decode(pipeline.from_vae_scale(samples), settings), settings.num_frames)
        return io.NodeOutput(images, float(fps), to_video(images, fps))


class Wan21TPUPipeline(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Wan21TPUPipeline",
            display_name="Wan 2.1 TPU Full Pipeline",
            category=CATEGORY,
            description="From a prompt to a video in one node: text encoder, transformer and VAE, all on the device.",
            inputs=[
                inputs.prompt(),
                inputs.negative_prompt(),
                *inputs.sampling(),
                inputs.fps(),
                inputs.model_id(),
                inputs.scheduler(),
                inputs.lora(),
            ],
            outputs=inputs.frame_outputs(),
        )

    @classmethod
    def validate_inputs(cls, num_frames: int | None = None) -> bool | str:
        return _check_frames(num_frames)

    @classmethod
    def execute(cls, prompt: str, fps: int, model_id: str, lora: Any = None, **chosen: Any) -> io.NodeOutput:
        inputs.check_whole(num_frames=chosen["num_frames"], num_inference_steps=chosen["num_inference_steps"], fps=fps)
        latent_frames = (chosen["num_frames"] - 1) // inputs.FRAMES_STEP + 1
        stages = {"denoising": chosen["num_inference_steps"], "decoding": latent_frames}
        with pipeline_run(model_id, stages, inputs.check_loras(lora)) as pipeline:
            settings = _settings(pipeline, fps=fps, **chosen)
            embeddings = pipeline.encode(prompt, settings)
            _warn_of_cut(embeddings.cut)
            latents = pipeline.denoise(embeddings, settings)
            images = to_images(pipeline.decode(latents, settings), settings.num_frames)
        return io.NodeOutput(images, float(fps), to_video(images, fps))


def _check_frames(num_frames: int | None) -> bool | str:
    """None: it comes over a link, and is checked when it is there."""
    return True if num_frames is None else inputs.frames_problem(num_frames) or True


def _branches(
    pipeline: VideoPipeline, settings: GenerationSettings, **given: Conditioning
) -> list[dict[str, torch.Tensor]]:
    """Each as the model reads it, all of one length."""
    tokens, features = pipeline.embedding_shapes(settings)["text"]
    read = [from_conditioning(name, embeds, tokens=tokens, features=features) for name, embeds in given.items()]
    longest = max(embeds.shape[1] for embeds in read)
    return [{"text": torch.nn.functional.pad(embeds, (0, 0, 0, longest - embeds.shape[1]))} for embeds in read]


def _settings(pipeline: VideoPipeline, *, height: int, width: int, **chosen: Any) -> GenerationSettings:
    """A model made for sizes below the widgets' smallest is drawn at its own: there is no other way to ask for it."""
    own = pipeline.defaults
    if max(own.height, own.width) < inputs.SIZE_MIN:
        if (height, width) != (own.height, own.width):
            logger.info(
                "%s draws %d×%d only; height and width are not used", pipeline.model_name, own.width, own.height
            )
        height, width = own.height, own.width
    return pipeline.settings(height=height, width=width, **chosen)


def _warn_of_cut(cut: str) -> None:
    if cut:
        logger.warning("prompt is longer than the model reads; this was cut off: %s", cut)
