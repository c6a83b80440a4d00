"""Shared code of the commands that run a pipeline: opening it, showing progress, reporting at the end.

With --json, one object on stdout. Its keys stay; new ones may be added:

    schema      1
    outputs     paths of the files made
    skipped     true if they were there already
    prompt      and prompt_cut, what of it was beyond the model's limit ("" if nothing)
    seed
    settings    all of them, by their Python names
    model       name, fingerprint
    loras       name, fingerprint and strength of each that has one
    preset      the name of the preset in use, or null
    quantize    what the transformer computes in 8 bits, such as "fp8, int8 scores", or none
    seconds     by stage: loading, compiling, encoding, denoising, decoding, other; and total
    programs    what, from_cache (false: compiled now), seconds
    reused      numbers of the steps, from 1, at which the transformer did not run
    resumed_after   the number of steps that --checkpoint-every had saved, which were not computed again
    profile     the directory of --profile, or null; dump: that of --dump, or null
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from comfy_tpu.cli import options
from comfy_tpu.cli.preview_file import PreviewFile, check_preview
from comfy_tpu.cli.profile import Profile
from comfy_tpu.cli.progress import Display
from comfy_tpu.cli.terminal import print_message, print_paths
from comfy_tpu.config import GenerationSettings, Interpolation, SecondPass, SingleFiles
from comfy_tpu.errors import CheckpointError, InvalidValueError
from comfy_tpu.families.card import ModelCard, Preset
from comfy_tpu.families.presets import AUTO, find_preset
from comfy_tpu.families.registry import find_published
from comfy_tpu.families.settings import make_settings
from comfy_tpu.jobs import opening
from comfy_tpu.parallel.hosts import check_same, first_host_value, host_names, is_first_host
from comfy_tpu.pipeline import artifacts, atomic, interpolation, media, reuse, video
from comfy_tpu.pipeline.checks import check_context, check_tiled_media
from comfy_tpu.pipeline.embeddings import PromptEmbeddings
from comfy_tpu.pipeline.given_media import NO_MEDIA, GivenMedia, follow_media
from comfy_tpu.pipeline.initial import INITIAL, read_strength
from comfy_tpu.pipeline.interpolation import Interpolator, check_interpolation
from comfy_tpu.pipeline.lora_report import summarize
from comfy_tpu.pipeline.media_fitting import check_given
from comfy_tpu.pipeline.model_files import ModelFiles, find_local, list_model_files
from comfy_tpu.pipeline.path_conflicts import check_conflicts
from comfy_tpu.pipeline.progress import Progress
from comfy_tpu.pipeline.second_pass import check_second_pass, describe_second_pass, read_second_pass
from comfy_tpu.pipeline.step_checkpoint import StepCheckpoint, checkpoint_path
from comfy_tpu.terminal_text import excerpt

_SHOWN = ("width", "height", "num_frames", "num_inference_steps", "guidance_scale", "flow_shift", "negative_prompt")
"""The settings of which a terminal shows what the model decided."""


class Session:
    def __init__(
        self,
        arguments: argparse.Namespace,
        pipeline: video.VideoPipeline,
        display: Display,
        preview: PreviewFile | None = None,
    ) -> None:
        self.arguments = arguments
        self.pipeline = pipeline
        self.display = display
        self._preview = preview
        self.loras: str = pipeline.loras.text
        """The LoRAs of the latents, as JSON in artifacts."""
        self.attention_window = pipeline.attention_window
        """The attention window of the latents, as text in artifacts."""
        self.quantization = pipeline.quantization
        """What the latents' transformer computed in 8 bits, as text in artifacts."""
        self.images_fingerprint = ""
        """The fingerprint of the given images."""
        self.second_pass = ""
        """What the denoising started from, as JSON in artifacts, where it is latents of an earlier one."""
        self._interpolator: Interpolator | None = None
        self._init_image_metadata: dict[str, str] = {}
        self._checkpoints: list[StepCheckpoint] = []

    @property
    def makes_images(self) -> bool:
        return self.pipeline.limits.frames_max == 1

    @property
    def made_from(self) -> dict[str, str]:
        """What artifacts and videos say of the latents, besides prompt, settings and model."""
        return {
            "images_fingerprint": self.images_fingerprint,
            "loras": self.loras,
            "attention_window": self.attention_window,
            "quantization": self.quantization,
            "preset": self.pipeline.preset.name or "",
            "second_pass": self.second_pass,
        }

    def settings(self, base: GenerationSettings | None = None, given: GivenMedia = NO_MEDIA) -> GenerationSettings:
        """The model's defaults, or `base`, replaced by the values on the command line. `given`: what may decide how
        long the result is."""
        known = dataclasses.asdict(base) if base else {}
        if (preset := getattr(self.arguments, "fast", None)) is not None:
            known = {name: value for name, value in known.items() if name not in dataclasses.asdict(preset)}
        # A preset of the file that `base` is from is in these settings already, with what was chosen beside it.
        preset = {} if getattr(self.arguments, "preset_of_input", False) else self.pipeline.preset.settings
        said = opening.choose_settings(vars(self.arguments), self.pipeline.family.card.sizes, preset)
        said = follow_media(said, given, self.pipeline.family.card, self.pipeline.defaults)
        settings = self.pipeline.settings(**{**known, **said})
        left = [name for name in _SHOWN if name not in known and said.get(name) in (None, "")]
        self.display.show_own_settings({name: getattr(settings, name) for name in left})
        if hasattr(self.arguments, "lora"):
            self.pipeline.warn_of_preset(settings)
        if self._preview is not None:
            self._preview.fps = settings.fps
        return self.pipeline.settle_context(settings, getattr(self.arguments, "image", ()))

    def set_media(self, given: GivenMedia) -> None:
        """Checks the given media and records their fingerprint."""
        opening.check_last_image(vars(self.arguments), self.pipeline)
        self.images_fingerprint = given.fingerprint

    def set_second_pass(self, settings: GenerationSettings, second: SecondPass | None, given: GivenMedia) -> None:
        """Checks a second pass after one with these settings, and records it."""
        if second is not None:
            check_second_pass(self.pipeline.family.card, self.pipeline.model_name, settings, second, given)
            self.second_pass = describe_second_pass(settings, second)

    def set_interpolation(self, settings: GenerationSettings, chosen: Interpolation | None) -> None:
        """Checks what makes frames between those of videos with these settings."""
        limits = self.pipeline.limits
        check_interpolation(chosen, makes_images=self.makes_images, fps=settings.fps, fps_max=limits.fps_max)
        if chosen is not None and is_first_host():  # the others write nothing
            runtime = opening.make_runtime(vars(self.arguments))
            self._interpolator = Interpolator(chosen, runtime.platform, runtime.cache)

    @property
    def _decoded_by(self) -> dict[str, str]:
        """What videos say besides `made_from`."""
        between = "" if self._interpolator is None else self._interpolator.fingerprint
        return {"tiny_vae": self.pipeline.tiny_vae, "interpolation": between}

    def _written(self, settings: GenerationSettings) -> GenerationSettings:
        """The settings with the frames of the files."""
        factor = 1 if self._interpolator is None else self._interpolator.factor
        frames = (settings.num_frames - 1) * factor + 1
        return dataclasses.replace(settings, num_frames=frames, fps=settings.fps * factor)

    def set_strength(self, embeddings: PromptEmbeddings) -> None:
        """Records how much of an image or video to start from is replaced."""
        if INITIAL in embeddings.shared:
            self._init_image_metadata = {"strength": str(read_strength(embeddings.shared))}

    def is_up_to_date(
        self, output: Path, prompt: str, settings: GenerationSettings, *found: Mapping[str, str], **decoded_by: str
    ) -> bool:
        """Whether the metadata found are those of the same run; if so, a message is printed. The first host decides.
        `decoded_by`: what `artifacts.describe` is told of frames."""
        return bool(first_host_value(lambda: self._is_up_to_date(output, prompt, settings, *found, **decoded_by)))

    def _is_up_to_date(
        self, output: Path, prompt: str, settings: GenerationSettings, *found: Mapping[str, str], **decoded_by: str
    ) -> bool:
        expected = artifacts.describe(prompt, settings, self.pipeline, **self.made_from, **decoded_by)
        if self.arguments.force or not all(artifacts.is_same(metadata, expected) for metadata in found):
            return False
        print_message(f"{output} is there already, from the same model, prompt and settings; --force makes it again")
        return True

    def are_videos_up_to_date(self, paths: Sequence[Path], prompt: str, settings: GenerationSettings) -> bool:
        if not is_first_host():
            return self.is_up_to_date(Path(), prompt, settings)
        sheet = self.arguments.contact_sheet
        found = [media.find_metadata(path, self._written(settings).num_frames) for path in paths]
        if sheet is not None:
            found.append(media.find_metadata(sheet, 1))
        return self.is_up_to_date(paths[0], prompt, settings, *found, **self._decoded_by)

    def check_outputs(self, *paths: Path) -> None:
        """Raises where an output would replace another one, or a file that this run reads. --force changes nothing."""
        if not is_first_host():
            return
        model = [path for path in list_model_files(self.pipeline.directory) if path.name != reuse.CURVE_FILE]
        check_conflicts(_output_fields(self.arguments, paths), [*options.list_input_files(self.arguments), *model])

    def choose_outputs(self, own: Callable[[], str | Path], settings: GenerationSettings) -> Sequence[Path]:
        """The checked paths of the videos, `own` where none is given; none on a host that writes nothing."""
        if not is_first_host():
            return ()
        paths = media.check_output(self.arguments.output or own(), self._written(settings))
        self.check_outputs(*paths)
        return paths

    def open_checkpoint(self, outputs: Sequence[Path], part: str = "") -> StepCheckpoint | None:
        """Where the steps are saved, beside the first of the outputs; None without --checkpoint-every. `outputs`: empty
        on a host that writes nothing. `part`: a name for each denoising but the first."""
        every = self.arguments.checkpoint_every
        if every is None:
            return None
        path = checkpoint_path(outputs[0], part) if outputs else Path()
        checkpoint = StepCheckpoint(path, every, report=print_message)
        checkpoint.check()
        if is_first_host():
            check_conflicts([("checkpoint", path)], options.list_input_files(self.arguments))
        self._checkpoints.append(checkpoint)
        return checkpoint

    def remove_checkpoint(self) -> None:
        """After the output is at its place."""
        for checkpoint in self._checkpoints:
            checkpoint.remove()

    def write_videos(self, latents: Any, prompt: str, settings: GenerationSettings, paths: Sequence[Path]) -> None:
        sound = self.pipeline.decode_sound(latents, settings)
        if not is_first_host():
            for _ in self.pipeline.decode(latents, settings):  # the first host writes what all of them compute
                pass
            return
        description = self._init_image_metadata | artifacts.describe(
            prompt, settings, self.pipeline, **self.made_from, **self._decoded_by
        )
        frames = self.pipeline.decode(latents, settings)
        media.write_videos(
            paths,
            frames if self._interpolator is None else self._interpolator.interpolate(frames),
            fps=self._written(settings).fps,
            metadata=[{**description, "video": str(index)} for index in range(len(paths))],
            sheet=self.arguments.contact_sheet,
            sound=sound,
        )

    def report(
        self,
        outputs: Sequence[Path],
        prompt: str,
        settings: GenerationSettings,
        *,
        cut: str = "",
        skipped: bool = False,
    ) -> int:
        if not is_first_host():
            return 0
        if not self.arguments.json:
            print_paths(outputs)
            return 0
        account = self.display.account
        total = account.total
        document = {
            "schema": 1,
            "outputs": [str(path) for path in outputs],
            "skipped": skipped,
            "prompt": prompt,
            "prompt_cut": cut,
            "seed": settings.seed,
            "settings": dataclasses.asdict(settings),
            "model": {"name": self.pipeline.model_name, "fingerprint": self.pipeline.model_fingerprint},
            "loras": json.loads(self.loras or "[]"),
            "preset": self.pipeline.preset.name,
            "quantize": self.quantization or "none",
            "seconds": {**account.seconds, "other": total - sum(account.seconds.values()), "total": total},
            "programs": [dataclasses.asdict(program) for program in account.programs],
            "reused": account.reused,
            "resumed_after": sum(checkpoint.resumed_after for checkpoint in self._checkpoints),
            "profile": _text(getattr(self.arguments, "profile", None)),
            "dump": _text(getattr(self.arguments, "dump", None)),
        }
        print(json.dumps(document, indent=2))
        return 0


def open_next_stage(
    arguments: argparse.Namespace, path: Path, header: artifacts.Header
) -> contextlib.AbstractContextManager[Session]:
    """Opens a session with the model of the command line, else with the model that made the artifact at `path`."""
    if getattr(arguments, "preset", "") is None and header.preset:
        arguments.preset, arguments.preset_of_input = header.preset, True  # its LoRA is still to come
    chosen = options.chosen_model(arguments)
    if chosen is not None:
        return open_session(arguments, chosen)
    return open_session(arguments, artifacts.find_model(path, header), name=header.model_name)


@contextlib.contextmanager
def open_session(
    arguments: argparse.Namespace,
    model: str | Path | SingleFiles | None,
    *,
    name: str | None = None,
    blank: bool = False,
    given: GivenMedia | None = None,
) -> Iterator[Session]:
    """Opens a model and shows its progress. `name` replaces `model` in messages. `blank`: without its weights.
    `given`: what is checked before a model is downloaded for it."""
    assert model is not None
    options.check_debugging(arguments)
    _check_before_download(arguments, model, given)
    path = getattr(arguments, "preview", None)
    check_preview(path)
    with Display() as display, Profile(getattr(arguments, "profile", None)) as profile:
        previews: list[PreviewFile] = []  # at most one

        def on_progress(progress: Progress) -> None:
            profile(progress)
            display(progress)
            for preview in previews:
                preview(progress)

        pipeline = video.VideoPipeline.open(
            model,
            opening.make_runtime(vars(arguments)),
            name=name,
            on_progress=on_progress,
            loras=getattr(arguments, "lora", ()),
            preset=getattr(arguments, "preset", None),
            check=lambda files: _check_settings(arguments, files),
            blank=blank,
        )
        if path is not None:
            previews.append(PreviewFile(path, pipeline))
        for lora in pipeline.loras.opened:
            print_message(summarize(lora, pipeline.preset.presets))
        if host_names():
            _check_hosts(pipeline)
        yield Session(arguments, pipeline, display, *previews)


def read_interpolation(arguments: argparse.Namespace) -> Interpolation | None:
    """The interpolation of the command line, checked before the model is opened."""
    return interpolation.read_interpolation(arguments.interpolate, arguments.interpolation_model)


def _check_hosts(pipeline: video.VideoPipeline) -> None:
    """Raises HostsError where another host has another model of the same name, or another mesh."""
    check_same(
        model=f"{pipeline.model_name} ({pipeline.model_fingerprint})",
        mesh=str(pipeline.placement.sizes),
        dtype=pipeline.dtype_name,
    )


def _check_before_download(
    arguments: argparse.Namespace, model: str | Path | SingleFiles, given: GivenMedia | None
) -> None:
    """Checks a request by the built-in description of a model that is not on this machine yet."""
    published = find_published(model) if isinstance(model, str) else None
    if published is None or find_local(str(model)) is not None:
        return
    hub_id, card = published
    settings = _choose_settings(arguments, card, card.presets, card.defaults_of(hub_id), hub_id, given or NO_MEDIA)
    check_context(card, hub_id, settings)
    if given is not None:
        check_given(card, given, settings, hub_id)
        check_tiled_media(card, hub_id, settings, given)
    if (second := read_second_pass(vars(arguments))) is not None:
        check_second_pass(card, hub_id, settings, second, given or NO_MEDIA)


def _check_settings(arguments: argparse.Namespace, files: ModelFiles) -> None:
    """Checks the settings before devices are started, whose messages would come before the error."""
    _choose_settings(arguments, files.family.card, files.presets, files.defaults, files.name)


def _choose_settings(
    arguments: argparse.Namespace,
    card: ModelCard,
    presets: Mapping[str, Preset],
    defaults: GenerationSettings,
    model: str,
    given: GivenMedia = NO_MEDIA,
) -> GenerationSettings:
    """Those of the command line, as far as they are known before a model is open."""
    name = getattr(arguments, "preset", None)
    preset = {} if name in (None, AUTO) else find_preset(presets, name, model).settings
    chosen = opening.choose_settings(vars(arguments), card.sizes, preset)
    return make_settings(defaults, follow_media(chosen, given, card, defaults), card.limits)


def check_video_output(arguments: argparse.Namespace, num_videos: int = 1) -> None:
    """Checks the outputs before the model is opened, which may download it."""
    if not is_first_host():
        return
    paths = () if arguments.output is None else media.check_output(arguments.output)
    if arguments.contact_sheet is not None:
        media.check_contact_sheet(arguments.contact_sheet)
    if num_videos == 1:  # several have other names
        check_conflicts(_output_fields(arguments, paths), options.list_input_files(arguments))


def _output_fields(arguments: argparse.Namespace, paths: Sequence[Path]) -> list[tuple[str, Path]]:
    """All outputs with their fields, for errors; the contact sheet and the preview are some."""
    named = ((name, getattr(arguments, name, None)) for name in ("contact_sheet", "preview"))
    return [*(("output", path) for path in paths), *((name, path) for name, path in named if path is not None)]


def read_existing_artifact(path: Path, stage: artifacts.Stage, arguments: argparse.Namespace) -> dict[str, str]:
    """The metadata of the artifact at `path`, empty if there is none; raises InvalidValueError for another file."""
    if path.suffix != artifacts.SUFFIX:
        raise InvalidValueError(f"output={path} is for tensors; give it a name in {artifacts.SUFFIX}", field="output")
    if not is_first_host():
        return {}
    atomic.check_place(path)
    check_conflicts([("output", path)], options.list_input_files(arguments))
    if arguments.force or not path.exists():
        return {}
    try:
        return artifacts.read_metadata(path, stage)
    except (CheckpointError, InvalidValueError) as error:
        raise InvalidValueError(
            f"output={path} would be replaced, and is not ours ({error}); choose another name, or --force to replace "
            "it",
            field="output",
        ) from error


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def warn_of_cut(cut: str) -> None:
    if cut:
        print_message(f"warning: PROMPT is longer than the model reads; this was cut off: {excerpt(cut)}")
