"""The nodes of a model family: one per stage, and one for the full pipeline. Every family has the same kinds."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from comfy_api.latest import io

from comfy_tpu.comfy import inputs
from comfy_tpu.comfy.exchange import (
    Conditioning,
    Latent,
    TimedPrompt,
    check_conditioning,
    check_fps,
    from_conditioning,
    from_frames,
    from_images,
    from_latent,
    from_mask,
    node_output,
    to_audio,
    to_conditioning,
    to_images,
    to_latent,
    to_video,
)
from comfy_tpu.comfy.initial_latents import read_initial_latents, settings_for_each, start_from
from comfy_tpu.comfy.node_text import NodeText, size_text
from comfy_tpu.comfy.remote_run import remote_run
from comfy_tpu.comfy.run import pipeline_run, show_note
from comfy_tpu.config import Lora, RunOptions, SecondPass, SingleFiles
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.card import NodeSet
from comfy_tpu.families.presets import describe_settings
from comfy_tpu.terminal_text import excerpt

if TYPE_CHECKING:
    from comfy_tpu.comfy.run import NodePipeline
    from comfy_tpu.config import GenerationSettings
    from comfy_tpu.pipeline.embeddings import PromptEmbeddings
    from comfy_tpu.pipeline.given_media import GivenMedia
    from comfy_tpu.pipeline.sound import Waveform

logger = logging.getLogger(__name__)


class FamilyNode(io.ComfyNode):
    FAMILY: ClassVar[NodeSet]
    KIND: ClassVar[str]
    """The suffix of the node's id."""

    @classmethod
    def schema(
        cls, title: str, description: str, input_list: list[io.Input], output_list: list[io.Output]
    ) -> io.Schema:
        family = cls.FAMILY
        return io.Schema(
            node_id=f"{family.key}{cls.KIND}",
            display_name=f"{family.name} {title}",
            category=family.category,
            description=description,
            inputs=[*input_list, inputs.pipeline(), inputs.options(), inputs.server()],
            outputs=output_list,
        )


class TextEncoder(FamilyNode):
    KIND = "TextEncoder"

    @classmethod
    def define_schema(cls) -> io.Schema:
        family = cls.FAMILY
        given, made = [inputs.prompt(family)], ["prompt"]
        if family.has_negative_prompt:
            given, made = [*given, inputs.negative_prompt(family)], [*made, "negative prompt"]
        sees = family.text_encoder_sees_images
        return cls.schema(
            "Text Encoder (TPU)",
            f"Reads the {' and the '.join(made)}{' beside the images' if sees else ''} with "
            f"{family.words.text_encoder}, on the device.",
            [*given, inputs.model_id(family), *(inputs.reference_inputs(family) if sees else [])],
            [
                io.Conditioning.Output(f"{name.replace(' ', '_')}_embeds", tooltip=f"The {name} as the model reads it.")
                for name in made
            ],
        )

    @classmethod
    def validate_inputs(cls, prompt: str | None = None) -> bool | str:
        what = f"it is empty; say what the {inputs.noun(cls.FAMILY)} should show"
        return what if prompt is not None and not prompt.strip() else True

    @classmethod
    def execute(
        cls,
        prompt: str,
        model_id: str,
        negative_prompt: str | None = None,
        pipeline: Any = None,
        options: Any = None,
        server: Any = None,
        **images: Any,
    ) -> io.NodeOutput:
        family, model = cls.FAMILY, inputs.choose_model(model_id, pipeline)
        run_options, given = inputs.check_options(options), _take_images(images)
        with open_run(family, model, {"encoding": 1}, server, run_options) as pipeline:
            chosen = _make_settings(pipeline, negative_prompt=negative_prompt)
            pipeline.warn_of_ignored(chosen)
            # Over 1, so that the negative prompt is read too: whether it counts is the sampler's guidance_scale.
            embeddings = pipeline.encode_text(prompt, dataclasses.replace(chosen, guidance_scale=2.0), given)
        _warn_of_cut(embeddings.cut)
        branches = [embeddings.positive]
        if family.has_negative_prompt:
            nothing = {name: torch.zeros_like(row) for name, row in embeddings.positive.items()}
            branches.append(embeddings.negative or nothing)  # some models of the family have no branch for it
        return node_output(*(to_conditioning(branch, family.conditioning_keys) for branch in branches))


class ImageEncoder(FamilyNode):
    KIND = "ImageEncoder"

    @classmethod
    def define_schema(cls) -> io.Schema:
        family = cls.FAMILY
        model = inputs.model_id(family)
        if family.image_role == "reference":
            first, *more = inputs.reference_inputs(family)
            what, size = "Encodes reference images for the model to read beside the prompt", ""
            given = [first, model, *more]
        else:
            words = f"The first frame: one image of any size, {inputs.resize_text(family)}."
            frame = io.Image.Input("image", tooltip=words)
            last = [inputs.frame(family, "last_image", "last")] if family.has_last_image else []
            ending = " and, for models that take one, the last" if family.has_last_image else ""
            what, size = f"Encodes the first frame of a video{ending}", ", at the same size"
            given = [frame, *inputs.size_inputs(family, keeps_numbers=False), model, *last]
        made = inputs.IMAGE_TYPE.Output("image_embeds", tooltip=f"For {family.name} TPU Sampler{size}.")
        return cls.schema("Image Encoder (TPU)", f"{what}, on the device.", given, [made])

    @classmethod
    def validate_inputs(cls, num_frames: int | None = None) -> bool | str:
        return _check_frames(cls.FAMILY, num_frames)

    @classmethod
    def execute(
        cls, model_id: str, pipeline: Any = None, options: Any = None, server: Any = None, **chosen: Any
    ) -> io.NodeOutput:
        given, run_options = _take_images(chosen), inputs.check_options(options)
        inputs.check_integers(**_pick_counts(chosen))
        count = _latent_frames(cls.FAMILY, chosen) if "num_frames" in chosen else len(given)
        model = inputs.choose_model(model_id, pipeline)
        with open_run(cls.FAMILY, model, {"encoding": count}, server, run_options) as pipeline:
            context = run_options.context_settings
            settings = _make_settings(pipeline, **chosen, **context) if chosen else pipeline.settings()
            return node_output(pipeline.encode_media(given, settings))


class VideoEncoder(FamilyNode):
    KIND = "VideoEncoder"

    @classmethod
    def define_schema(cls) -> io.Schema:
        family = cls.FAMILY
        sizes = inputs.size_inputs(family, keeps_numbers=False)
        given = [*sizes, inputs.model_id(family), *inputs.media_inputs(family)]
        made = inputs.IMAGE_TYPE.Output("image_embeds", tooltip=f"For {family.name} TPU Sampler, at the same size.")
        return cls.schema(
            "Video Encoder (TPU)",
            "Encodes given videos, masks and images for the sampler, on the device.",
            given,
            [made],
        )

    @classmethod
    def validate_inputs(cls, num_frames: int | None = None) -> bool | str:
        return _check_frames(cls.FAMILY, num_frames)

    @classmethod
    def execute(
        cls, model_id: str, pipeline: Any = None, options: Any = None, server: Any = None, **chosen: Any
    ) -> io.NodeOutput:
        given, run_options = _take_media(cls.FAMILY, chosen), inputs.check_options(options)
        inputs.check_integers(**_pick_counts(chosen))
        count = _latent_frames(cls.FAMILY, chosen)
        model = inputs.choose_model(model_id, pipeline)
        with open_run(cls.FAMILY, model, {"encoding": count}, server, run_options) as pipeline:
            settings = _make_settings(pipeline, **chosen, **run_options.context_settings)
            return node_output(pipeline.encode_media(given, settings))


class Sampler(FamilyNode):
    KIND = "TPUSampler"

    @classmethod
    def define_schema(cls) -> io.Schema:
        family = cls.FAMILY
        negative = [inputs.negative_prompt_embeds(family)] if family.has_negative_prompt else []
        given = [
            inputs.prompt_embeds(family),
            *negative,
            *inputs.sampling_inputs(family),
            *([inputs.fps(family)] if family.reads_fps else []),
            inputs.model_id(family),
            inputs.scheduler(family),
            inputs.lora(),
        ]
        frames = io.Int.Output("num_frames_out", display_name="num_frames", tooltip="Frames that the latents hold.")
        others = ", with the sound" if family.makes_sound else ", or for ComfyUI's own VAE Decode"
        latents = io.Latent.Output("latents", tooltip=f"For {family.name} TPU VAE Decoder{others}.")
        return cls.schema(
            "TPU Sampler",
            f"Denoises {_noun(family)}'s latents from the prompt, on all chips.",
            [*given, *([inputs.image_embeds(family)] if _has_encoder(family) else []), *inputs.start_inputs(family)],
            [latents] if family.makes_images else [latents, frames],
        )

    @classmethod
    def validate_inputs(cls, num_frames: int | None = None) -> bool | str:
        return _check_frames(cls.FAMILY, num_frames)

    @classmethod
    def execute(
        cls,
        prompt_embeds: Conditioning,
        model_id: str,
        negative_prompt_embeds: Conditioning | None = None,
        lora: Any = None,
        image_embeds: Any = None,
        initial_latents: Latent | None = None,
        strength: float = SecondPass(0.0).strength,
        pipeline: Any = None,
        options: Any = None,
        server: Any = None,
        **chosen: Any,
    ) -> io.NodeOutput:
        family, run_options = cls.FAMILY, inputs.check_options(options)
        inputs.check_integers(**_pick_counts(chosen))
        given = {"prompt_embeds": prompt_embeds}
        if family.has_negative_prompt:
            given["negative_prompt_embeds"] = negative_prompt_embeds or []
        for name, prompt in given.items():  # what can be refused before the model is opened
            check_conditioning(name, prompt, chosen["num_inference_steps"] or 1)
        shared = _check_image_embeds(image_embeds)
        begun = read_initial_latents(initial_latents, chosen.get("fps") or None)
        stages = {"denoising": _step_count(family, chosen)}
        model = inputs.choose_model(model_id, pipeline)
        loras = inputs.check_loras(lora)
        with open_run(family, model, stages, server, run_options, loras) as pipeline:
            followed = _reference_size(pipeline, shared)
            settings = _make_settings(pipeline, followed, **chosen, **run_options.settings)
            steps = settings.num_inference_steps
            prompts = {name: check_conditioning(name, prompt, steps) for name, prompt in given.items()}
            if begun is not None:
                settings = settings_for_each(begun, settings)
                shared = start_from(pipeline, shared, begun, strength, settings)
            embeddings = dataclasses.replace(_read_prompts(family, pipeline, settings, prompts), shared=shared)
            made = pipeline.to_vae_scale(pipeline.denoise(embeddings, settings))
        # Behind the frames is the sound of their seconds.
        latents = to_latent(made, is_image=family.makes_images, fps=settings.fps if family.makes_sound else None)
        return node_output(latents) if family.makes_images else node_output(latents, settings.num_frames)


class VAEDecoder(FamilyNode):
    KIND = "TPUVAEDecoder"

    @classmethod
    def define_schema(cls) -> io.Schema:
        family = cls.FAMILY
        return cls.schema(
            "TPU VAE Decoder",
            f"Decodes latents to {'images' if family.makes_images else 'frames'}, on all chips; in tiles where whole "
            f"{'ones' if family.makes_images else 'frames'} do not fit.",
            [inputs.latents(family), *([] if family.makes_images else [inputs.fps(family)]), inputs.model_id(family)],
            inputs.frame_outputs(family),
        )

    @classmethod
    def execute(
        cls,
        latents: Latent,
        model_id: str,
        fps: int | None = None,
        pipeline: Any = None,
        options: Any = None,
        server: Any = None,
    ) -> io.NodeOutput:
        samples, run_options = from_latent("latents", latents), inputs.check_options(options)
        if fps is not None:
            inputs.check_integers(fps=fps)
            fps = fps or latents.get("fps")
        check_fps("latents", latents, fps)
        model = inputs.choose_model(model_id, pipeline)
        stages = {"decoding": samples.shape[2]}
        with open_run(cls.FAMILY, model, stages, server, run_options) as pipeline:
            settings = pipeline.latent_settings(samples, fps=fps, **run_options.context_settings)
            own = pipeline.from_vae_scale(samples)
            sound = pipeline.decode_sound(own, settings)
            images = to_images(pipeline.decode(own, settings), settings.num_frames)
        return _frames_output(images, None if cls.FAMILY.makes_images else settings.fps, sound)


class Pipeline(FamilyNode):
    KIND = "TPUPipeline"

    @classmethod
    def define_schema(cls) -> io.Schema:
        family = cls.FAMILY
        given = [
            inputs.prompt(family),
            *([inputs.negative_prompt(family)] if family.has_negative_prompt else []),
            *inputs.sampling_inputs(family),
            *([] if family.makes_images else [inputs.fps(family)]),
            inputs.model_id(family),
            inputs.scheduler(family),
            inputs.lora(),
        ]
        return cls.schema(
            "TPU Full Pipeline",
            f"From a prompt to {_noun(family)} in one node: text encoder, transformer and VAE, all on the device.",
            [*given, *inputs.image_inputs(family)],
            inputs.frame_outputs(family),
        )

    @classmethod
    def validate_inputs(cls, num_frames: int | None = None) -> bool | str:
        return _check_frames(cls.FAMILY, num_frames)

    @classmethod
    def execute(
        cls,
        prompt: str,
        model_id: str,
        fps: int | None = None,
        lora: Any = None,
        pipeline: Any = None,
        options: Any = None,
        server: Any = None,
        **chosen: Any,
    ) -> io.NodeOutput:
        run_options = inputs.check_options(options)
        inputs.check_integers(**_pick_counts(chosen), **({} if fps is None else {"fps": fps}))
        given = _take_media(cls.FAMILY, chosen)
        stages = {"denoising": _step_count(cls.FAMILY, chosen), "decoding": _latent_frames(cls.FAMILY, chosen)}
        model = inputs.choose_model(model_id, pipeline)
        loras = inputs.check_loras(lora)
        with open_run(cls.FAMILY, model, stages, server, run_options, loras) as pipeline:
            followed = _image_size(pipeline, given)
            settings = _make_settings(pipeline, followed, fps=fps, **chosen, **run_options.settings)
            settings = pipeline.settle_context(settings, given.images)
            embeddings = pipeline.encode(prompt, settings, given)
            _warn_of_cut(embeddings.cut)
            latents = pipeline.denoise(embeddings, settings)
            sound = pipeline.decode_sound(latents, settings)
            images = to_images(pipeline.decode(latents, settings), settings.num_frames)
        return _frames_output(images, None if cls.FAMILY.makes_images else settings.fps, sound)


def open_run(
    family: NodeSet,
    model: str | SingleFiles,
    stages: Mapping[str, int],
    server: Any,
    options: RunOptions,
    loras: Sequence[Lora] = (),
) -> contextlib.AbstractContextManager[NodePipeline]:
    """The model's pipeline, here or on the server of a link."""
    remote = inputs.check_server(server)
    if remote is None:
        return pipeline_run(family, model, stages, options, loras)
    return remote_run(remote, family, model, stages, options, loras)


def _has_encoder(family: NodeSet) -> bool:
    """Whether images or videos are encoded by a node of their own."""
    return family.has_image_encoder or family.has_video_encoder


def _noun(family: NodeSet) -> str:
    return "an image" if family.makes_images else "a video"


def make_nodes(family: NodeSet) -> list[type[io.ComfyNode]]:
    images = [ImageEncoder] if family.has_image_encoder else []
    videos = [VideoEncoder] if family.has_video_encoder else []
    kinds: list[type[FamilyNode]] = [TextEncoder, *images, *videos, Sampler, VAEDecoder, Pipeline]
    return [type(f"{family.key}{kind.KIND}", (kind,), {"FAMILY": family}) for kind in kinds]


def _pick_counts(chosen: Mapping[str, Any]) -> dict[str, Any]:
    return {name: chosen[name] for name in ("num_frames", "num_inference_steps") if name in chosen}


def _frames_output(images: torch.Tensor, fps: int | None, sound: Waveform | None) -> io.NodeOutput:
    """The node's outputs: images, for a video model also the frame rate and the video (`fps` is None for images), and
    the sound if there is one."""
    if fps is None:
        return node_output(images)
    if sound is None:
        return node_output(images, float(fps), to_video(images, fps))
    audio = to_audio(sound)
    return node_output(images, float(fps), to_video(images, fps, audio), audio)


def _check_frames(family: NodeSet, num_frames: int | None) -> bool | str:
    """True, or the problem with num_frames; a value over a link (None here) is checked when the node runs."""
    return True if num_frames is None else inputs.frames_problem(family, num_frames) or True


def _take_images(chosen: dict[str, Any]) -> list[Any]:
    """Removes the connected images from `chosen` and returns them in the order in which a model reads them."""
    given = {name: chosen.pop(name, None) for name in (*inputs.REFERENCES, "last_image")}
    if given["image"] is None and given["last_image"] is not None:
        raise InvalidValueError("last_image is given without image; connect the first frame too", field="last_image")
    return [from_images(name, images) for name, images in given.items() if images is not None]


def _take_media(family: NodeSet, chosen: dict[str, Any]) -> GivenMedia:
    """Removes connected images, videos and their strengths from `chosen` and returns them."""
    from comfy_tpu.pipeline.given_media import GivenMedia

    images = tuple(_take_images(chosen))
    references = {name: chosen.pop(name, None) for name in inputs.reference_names(family)}
    videos = {video: chosen.pop(video.name, None) for video in family.video_inputs}
    strength, control = chosen.pop("strength", None), chosen.pop("control_strength", None)
    read = {
        video.name: (from_mask if video.role == "mask" else from_frames)(video.name, frames)
        for video, frames in videos.items()
        if frames is not None
    }
    return GivenMedia(
        images,
        tuple(from_images(name, image) for name, image in references.items() if image is not None),
        read,
        strength if read or (images and family.image_role == "initial") else None,  # widgets always have a value
        None if control is None else (control,),
    )


def _latent_frames(family: NodeSet, chosen: Mapping[str, Any]) -> int:
    return int((chosen.get("num_frames") or family.defaults.num_frames) - 1) // family.models[0].temporal_scale + 1


def _step_count(family: NodeSet, chosen: Mapping[str, Any]) -> int:
    """For the progress bar, before the model says its own."""
    return int(chosen["num_inference_steps"] or family.defaults.num_inference_steps)


def _check_image_embeds(image_embeds: Any) -> dict[str, torch.Tensor]:
    """The value of a link, which may be absent (empty); raises InvalidValueError for one of another type."""
    if image_embeds is None:
        return {}
    if not isinstance(image_embeds, dict) or not all(isinstance(each, torch.Tensor) for each in image_embeds.values()):
        raise InvalidValueError(
            f"image_embeds is a {type(image_embeds).__name__}, expected what an Image Encoder gives",
            field="image_embeds",
        )
    return image_embeds


def _read_prompts(
    family: NodeSet, pipeline: NodePipeline, settings: GenerationSettings, given: Mapping[str, list[TimedPrompt]]
) -> PromptEmbeddings:
    """The embeddings of all prompts, padded to the same length."""
    from comfy_tpu.pipeline.embeddings import PromptEmbeddings, TimedEmbeddings

    shapes = pipeline.embedding_shapes(settings)
    read = {
        name: [
            from_conditioning(name, prompt, shapes=shapes, keys=family.conditioning_keys, pads_text=family.pads_text)
            for prompt in prompts
        ]
        for name, prompts in given.items()
    }
    longest = max(embeds["text"].shape[1] for branch in read.values() for embeds in branch)
    branches = [
        tuple(
            TimedEmbeddings(
                prompt.start,
                prompt.end,
                embeds
                | {"text": torch.nn.functional.pad(embeds["text"], (0, 0, 0, longest - embeds["text"].shape[1]))},
            )
            for prompt, embeds in zip(given[name], embeddings, strict=True)
        )
        for name, embeddings in read.items()
    ]
    positive, negative = (*branches, ())[:2]
    first = negative[0].embeddings if negative else None
    embeddings = PromptEmbeddings("", positive[0].embeddings, first)
    if len(positive) == 1 and len(negative) <= 1:
        return embeddings
    return dataclasses.replace(embeddings, timed_positive=positive, timed_negative=negative)


def _image_size(pipeline: NodePipeline, given: GivenMedia) -> dict[str, Any]:
    """Width and height of a result that has the shape of the last image."""
    from comfy_tpu.pipeline.given_media import follow_image

    return follow_image(pipeline.card, given.images)


def _reference_size(pipeline: NodePipeline, shared: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Width and height of a result that has the shape of the last encoded image, whose latents have its size."""
    card, names = pipeline.card, sorted(name for name in shared if name.startswith("reference_"))
    if card.image is None or not card.image.result_area or not names:
        return {}
    height, width = shared[names[-1]].shape[-2:]
    return {"height": height * card.spatial_scale, "width": width * card.spatial_scale}


def _make_settings(pipeline: NodePipeline, followed: Mapping[str, Any] = {}, /, **chosen: Any) -> GenerationSettings:
    """The settings of a run. `followed`: the size of given images, for a model that follows them. A model for sizes
    below the widgets' minimum (the demo model) uses its own size; a preset replaces what the widgets say."""
    if not pipeline.has_two_transformers:  # the widget is there for others of the family
        chosen.pop("guidance_scale_2", None)
    own, wanted = pipeline.defaults, inputs.drop_own(chosen)
    left = [name for name in chosen if name not in wanted and name not in pipeline.preset.settings]
    if max(own.height, own.width) < inputs.SIZE_MIN:
        sides = {name: wanted.pop(name) for name in ("height", "width") if name in wanted}
        if any(value != getattr(own, name) for name, value in sides.items()):
            size = size_text(f"{own.width}×{own.height}")
            logger.warning("%s always draws %s: height and width have no effect", pipeline.model_name, size)
            show_note(pipeline, NodeText("node.fixed_size", {"model": pipeline.model_name, "size": size}))
    settings = pipeline.settings(**{**followed, **wanted, **pipeline.preset.settings})
    if words := describe_settings({name: getattr(settings, name) for name in left}):
        show_note(pipeline, NodeText("node.own", {"settings": words}))
    pipeline.warn_of_preset(settings)
    return settings


def _warn_of_cut(cut: str) -> None:
    if cut:
        logger.warning("prompt is longer than the model reads; this was cut off: %s", excerpt(cut))
