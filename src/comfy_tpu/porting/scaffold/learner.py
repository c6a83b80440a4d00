"""How a pipeline calls its parts, learned from two runs of a small one. What nothing explains is said in a sentence."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import GUIDE, UnsupportedError
from comfy_tpu.families.shared import schedulers
from comfy_tpu.families.shared.ported import as_frames, in_vae_scale
from comfy_tpu.pipeline.noise import initial_noise
from comfy_tpu.porting.scaffold import hypotheses
from comfy_tpu.porting.scaffold.hypotheses import (
    ENCODER_OUTPUTS,
    LAYOUTS,
    EncoderOutput,
    Layout,
    agrees,
    evaluate,
    find_expression,
)
from comfy_tpu.porting.scaffold.pipeline_run import Call, PipelineRun
from comfy_tpu.porting.scaffold.pipelines import PROMPT_ALONE, Source, image_arguments
from comfy_tpu.porting.scaffold.small_pipeline import TOKENS, explain_sizes, spatial_scale
from comfy_tpu.porting.targets import describe_error

GUIDANCE = 4.0
_RUNS = (
    (" a RED circle  and a blue", "black background", 6, 10, 9, 3),
    ("A circle moving left &amp; a red", "blue", 8, 6, 17, 2),
)
"""The first fields of each `PipelineRun`; prompts with what a pipeline may clean away: capitals, spaces, HTML."""

Case = tuple[dict[str, Any], dict[str, Any]]
"""Names that an expression may use, and the arguments of a call of the transformer."""


@dataclasses.dataclass(frozen=True)
class Embedding:
    """A text encoder's output that the transformer is given."""

    name: str
    encoder: str
    output: EncoderOutput
    cast: str
    """The method call behind its name among the transformer's arguments."""


@dataclasses.dataclass(frozen=True)
class PipelineCalls:
    """How a pipeline calls its parts, in expressions for the family's files."""

    makes_images: bool
    layout: Layout
    """The layout of the latents between steps, in the pipeline."""
    arguments: Mapping[str, str]
    """Expressions by the names of the transformer's parameters."""
    embeddings: Sequence[Embedding]
    prompt_cleanup: str
    velocity: str
    latent_statistics: str
    vae_layout: Layout
    spatial_scale: int
    temporal_scale: int
    frames_multiple: int
    scheduler: str
    """A function of families/shared/schedulers.py; empty: the scheduler's own class, with its configuration."""
    text_lengths: Mapping[str, int | None]
    """Tokens of each encoder; None: max_sequence_length."""
    unexplained: Sequence[str]
    """One sentence each."""
    transformer_call: Call
    """The first call of the first run."""
    decode_call: Call


def learn_calls(source: Source, pipeline: Any) -> PipelineCalls:
    """Raises UnsupportedError for a pipeline that does not run, or whose latents have an unknown layout."""
    return _Learner(source, pipeline).learn()


class _Learner:
    def __init__(self, source: Source, pipeline: Any) -> None:
        self.source = source
        self.pipeline = pipeline
        self.parameters = inspect.signature(type(pipeline).__call__).parameters
        self.channels = int(pipeline.vae.config.get("latent_channels") or pipeline.vae.config.get("z_dim"))
        self.scale = spatial_scale(pipeline.vae)
        self.makes_images = "num_frames" not in self.parameters
        self.layouts = [each for each in LAYOUTS if self.makes_images or each.holds_frames]
        self.layout: Layout
        self.temporal_scale: int
        self.runs: list[PipelineRun]
        self.unexplained: dict[str, None] = {}

    def learn(self) -> PipelineCalls:
        self.layout, self.temporal_scale = self._find_layout()
        self.runs = [self._run_from_noise(number) for number in (0, 1)]
        self._check_noise()
        cleanup = self._find_cleanup()
        arguments, embeddings = self._find_arguments(cleanup)
        velocity = self._find_velocity()
        statistics, vae_layout = self._find_statistics()
        self._check_pixels()
        return PipelineCalls(
            makes_images=self.makes_images,
            layout=self.layout,
            arguments=arguments,
            embeddings=embeddings,
            prompt_cleanup=cleanup,
            velocity=velocity,
            latent_statistics=statistics,
            vae_layout=vae_layout,
            spatial_scale=self.scale,
            temporal_scale=self.temporal_scale,
            frames_multiple=self._find_frames_multiple(),
            scheduler=self._find_scheduler(),
            text_lengths={encoder: self._text_length(encoder) for encoder in self.source.encoders},
            unexplained=list(self.unexplained),
            transformer_call=self.runs[0].transformer[0],
            decode_call=self.runs[0].decodes[0],
        )

    def _add_unexplained(self, sentence: str) -> None:
        self.unexplained[sentence] = None

    # Runs

    def _record(self, run: PipelineRun, **start: Any) -> None:
        """`start`: noise, or a generator of it."""
        options: dict[str, Any] = {"height": run.height * self.scale, "width": run.width * self.scale}
        options |= {"num_inference_steps": run.steps, "guidance_scale": GUIDANCE}
        optional = {"num_frames": run.num_frames, "max_sequence_length": TOKENS}
        optional |= {"use_resolution_binning": False, "clean_caption": False}
        options |= {name: value for name, value in optional.items() if name in self.parameters}
        try:
            run.record(self.pipeline, prompt=run.prompt, negative_prompt=run.negative_prompt, **options, **start)
        except Exception as error:
            images = image_arguments(self.source)
            why = f"it may want {' or '.join(images)}, {PROMPT_ALONE}" if images else explain_sizes(self.source)
            raise UnsupportedError(
                f"a small {self.source.name} does not run ({describe_error(error)}); {why}"
            ) from error

    def _latent_shape(self, run: PipelineRun, temporal_scale: int) -> tuple[int, int, int, int]:
        frames = 1 if self.makes_images else (run.num_frames - 1) // temporal_scale + 1
        return self.channels, frames, run.height, run.width

    def _find_layout(self) -> tuple[Layout, int]:
        """The layout and the frames of a latent, by the shape of the first step's sample."""
        run = PipelineRun(*_RUNS[0])
        self._record(run, generator=torch.Generator().manual_seed(0))
        shape = tuple(run.scheduler[0].given["sample"].shape[1:])
        for temporal_scale in (1,) if self.makes_images else (4, 8, 2, 1):
            for layout in self.layouts:
                if shape == layout.shape(*self._latent_shape(run, temporal_scale)):
                    return layout, temporal_scale
        size = f"{run.height * self.scale} × {run.width * self.scale} pixels"
        raise UnsupportedError(
            f"the latents of {self.source.name} have shape {shape} at {size}, which is none of "
            f"{', '.join(each.name for each in self.layouts)}; write the family by hand, {GUIDE} says how"
        )

    def _run_from_noise(self, number: int) -> PipelineRun:
        run = PipelineRun(*_RUNS[number])
        run.noise = initial_noise((1, *self._latent_shape(run, self.temporal_scale)), seed=number)
        self._record(run, latents=self.layout.from_latents(run.noise))
        return run

    def _check_noise(self) -> None:
        for run in self.runs:
            assert run.noise is not None
            if not agrees(run.scheduler[0].given["sample"], self.layout.from_latents(run.noise)):
                self._add_unexplained(
                    "the first sample is not the noise that it was given: the scheduler or the pipeline scales it"
                )

    # Texts

    def _find_cleanup(self) -> str:
        calls = [call for run in self.runs for texts in list(run.texts.values())[:1] for call in texts[:1]]
        given = [call.given["text"] for call in calls]
        texts = [text[0] if isinstance(text, (list, tuple)) else text for text in given]
        cases = [({"text": run.prompt}, text) for run, text in zip(self.runs, texts, strict=False)]
        found = find_expression(hypotheses.PROMPT_CLEANUPS, cases) if len(cases) == len(self.runs) else None
        if found is None:
            prompt, text = self.runs[0].prompt, texts[0] if texts else None
            self._add_unexplained(f"the prompt {prompt!r} becomes {text!r} before it is tokenized")
        return found or "text"

    def _tokenize(self, run: PipelineRun, encoder: str, cleanup: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and masks of the prompt and the negative prompt, as our own pipeline makes them."""
        tokenizer = getattr(self.pipeline, self.source.tokenizer(encoder))
        texts = [evaluate(cleanup, {"text": text}) for text in (run.prompt, run.negative_prompt)]
        seen = torch.cat([call.given["input_ids"] for call in run.encoders[encoder]])
        tokens = tokenizer(texts, padding="max_length", max_length=seen.shape[1], truncation=True, return_tensors="pt")
        if not all(bool((seen == row).all(dim=1).any()) for row in tokens.input_ids):
            self._add_unexplained(f"the {encoder} reads other tokens than its tokenizer makes of the prompt alone")
        return tokens.input_ids, tokens.attention_mask

    def _text_length(self, encoder: str) -> int | None:
        length = int(self.runs[0].encoders[encoder][0].given["input_ids"].shape[1])
        return None if "max_sequence_length" in self.parameters and length == TOKENS else length

    # The transformer

    def _find_arguments(self, cleanup: str) -> tuple[dict[str, str], list[Embedding]]:
        tokens = {
            encoder: [self._tokenize(run, encoder, cleanup) for run in self.runs] for encoder in self.source.encoders
        }
        cases = [list(self._cases(run)) for run in self.runs]
        first = [each[0] for each in cases]
        arguments: dict[str, str] = {}
        embeddings: list[Embedding] = []
        for name in first[0][1]:
            expected = [(names, given[name]) for each in cases for names, given in each]
            if name == "return_dict" or all(value is None for _, value in expected):
                continue
            expression = self._find_value(expected) or self._find_method_call(expected, [names for names, _ in first])
            if expression is None:
                embedding = self._find_embedding([given[name] for _, given in first], tokens, embeddings)
                if embedding is not None:
                    embeddings.append(embedding)
                    expression = f"{embedding.name}{embedding.cast}"
            if expression is None:
                shapes = " or ".join(sorted({_describe(value) for _, value in expected}))
                self._add_unexplained(f"the transformer is given {name}, {shapes}, and nothing tried says what it is")
                expression = f'unexplained("{name}")'
            arguments[name] = expression
        return arguments, embeddings

    def _cases(self, run: PipelineRun) -> Iterator[Case]:
        """Every call of the transformer."""
        for step, calls in run.calls_by_step():
            sample = self.layout.to_latents(step.given["sample"], run.height, run.width)
            timestep = torch.as_tensor(step.given["timestep"]).reshape(1).float()
            for call in calls:
                tensors = [value for value in call.given.values() if isinstance(value, torch.Tensor) and value.ndim > 1]
                batch = tensors[0].shape[0]
                names = {"timestep": timestep, "batch": batch, "height": run.height, "width": run.width}
                names["latents"] = sample.expand(batch, -1, -1, -1, -1)
                yield names, call.given

    def _find_value(self, expected: Sequence[tuple[Mapping[str, Any], Any]]) -> str | None:
        """Latents, the timestep, a constant or a size."""
        values = [value for _, value in expected]
        if all(isinstance(value, torch.Tensor) for value in values):
            return find_expression((*(each.expression for each in self.layouts), *hypotheses.TIMESTEPS), expected)
        literals = {_literal(value) for value in values}
        return literals.pop() if len(literals) == 1 else find_expression(hypotheses.SIZES, expected)

    def _find_method_call(
        self, expected: Sequence[tuple[Mapping[str, Any], Any]], names: Sequence[Mapping[str, Any]]
    ) -> str | None:
        """A call of the pipeline's own method that returned the value; `names` of the first case of each run."""
        if not isinstance(expected[0][1], (torch.Tensor, tuple, list)):
            return None
        for method, calls in self.runs[0].methods.items():
            others = self.runs[1].methods[method]
            if not calls or not others or not agrees(calls[0].result, expected[0][1]):
                continue
            pairs = zip(calls[0].given.values(), others[0].given.values(), strict=True)
            arguments = [self._find_method_argument(names, values) for values in pairs]
            if None in arguments:
                continue
            head = f'"{self.source.name}", "{method}", module, {self._read_facts(method)!r}'
            expression = f"by_pipeline({', '.join([head, *map(str, arguments)])})"
            cases = [({**each, "module": self.pipeline.transformer}, value) for each, value in expected]
            if find_expression([expression], cases):
                return expression
        return None

    def _find_method_argument(self, names: Sequence[Mapping[str, Any]], values: Sequence[Any]) -> str | None:
        if all(isinstance(value, torch.device) for value in values):
            return "latents.device"
        if all(isinstance(value, torch.dtype) for value in values):
            return "torch.float32"
        sizes = (*hypotheses.SIZES, f"{self.scale} * height", f"{self.scale} * width", "batch")
        found = find_expression(sizes, list(zip(names, values, strict=True)))
        return found or (_literal(values[0]) if values[0] == values[1] else None)

    def _read_facts(self, method: str) -> dict[str, Any]:
        """Numbers and texts of the pipeline that a method reads."""
        read = set(re.findall(r"self\.(\w+)", inspect.getsource(getattr(type(self.pipeline), method))))
        simple = {name: value for name, value in vars(self.pipeline).items() if isinstance(value, (int, float, str))}
        return {name: value for name, value in simple.items() if name in read}

    def _find_embedding(
        self,
        values: Sequence[Any],
        tokens: Mapping[str, Sequence[tuple[torch.Tensor, torch.Tensor]]],
        known: Sequence[Embedding],
    ) -> Embedding | None:
        """`values`: of the first case of each run."""
        value = values[0]
        if not isinstance(value, torch.Tensor) or value.shape[:1] not in ((1,), (2,)):
            return None
        for encoder in self.source.encoders:
            module = getattr(self.pipeline, encoder)
            for output in ENCODER_OUTPUTS[self.source.parts[encoder].__name__]:
                with torch.no_grad():
                    rows = [output.compute(module, *each) for each in tokens[encoder]]
                if all(map(_has_rows, rows, values)):
                    return Embedding(_embedding_name(output, value, known), encoder, output, _cast_to_dtype(value))
        return None

    def _find_velocity(self) -> str:
        """The transformer's answer as our latents: by the guided sum that the scheduler was given."""
        for form in hypotheses.ANSWERS:
            for layout in self.layouts:
                try:
                    if all(self._is_guided(run, form, layout) for run in self.runs):
                        return layout.inverse.format(form.format("answer"))
                except (RuntimeError, ValueError, IndexError):
                    continue
        step, answer = self.runs[0].scheduler[0].given["model_output"], self.runs[0].transformer[0].tensor
        self._add_unexplained(
            f"the scheduler is given {_describe(step)}, which is no guided sum of the transformer's answers "
            f"{_describe(answer)}"
        )
        return 'unexplained("answer")'

    def _is_guided(self, run: PipelineRun, form: str, layout: Layout) -> bool:
        for step, calls in run.calls_by_step():
            rows = torch.cat([call.tensor for call in calls]).float()
            latents = layout.to_latents(evaluate(form.format("answer"), {"answer": rows}), run.height, run.width)
            expected = self.layout.to_latents(step.given["model_output"].float(), run.height, run.width)
            if latents.shape[0] != 2:
                return False
            one, two = latents.split(1)
            if not any(agrees(a + GUIDANCE * (b - a), expected) for a, b in ((one, two), (two, one))):
                return False
        return True

    # The VAE and the scheduler

    def _find_statistics(self) -> tuple[str, Layout]:
        """Mean and deviation of the latents, and the layout in which the VAE is given them."""
        config = dict(self.pipeline.vae.config)
        for layout in self.layouts:
            for expression, keys in hypotheses.STATISTICS.items():
                if any(config.get(key) is None for key in keys):
                    continue
                statistics = evaluate(expression, {"config": config, "channels": self.channels})
                try:
                    if all(self._is_decoded(run, layout, statistics) for run in self.runs):
                        return expression, layout
                except (RuntimeError, ValueError, IndexError):
                    continue
        given = _describe(next(iter(self.runs[0].decodes[0].given.values())))
        self._add_unexplained(f"the VAE is given {given}, and no scale of the last latents is that")
        return '[unexplained("latent statistics")], []', self.layouts[0]

    def _is_decoded(self, run: PipelineRun, layout: Layout, statistics: tuple[list[float], list[float]]) -> bool:
        (call,) = run.decodes
        given = [value for name, value in call.given.items() if name != "return_dict"]
        last = self.layout.to_latents(run.scheduler[-1].tensor.float(), run.height, run.width)
        return len(given) == 1 and agrees(layout.from_latents(in_vae_scale(last, statistics)), given[0])

    def _check_pixels(self) -> None:
        for run in self.runs:
            frames = as_frames(run.decodes[0].tensor)[0].permute(0, 3, 1, 2)
            if not agrees(frames, run.output.reshape(-1, *run.output.shape[-3:]).float()):
                noun = "image" if self.makes_images else "video"
                self._add_unexplained(f"the {noun} is another than what the VAE decodes, brought to 0..1")

    def _find_frames_multiple(self) -> int:
        """How many frames a video may have, by what the VAE makes of a few latents."""
        if self.makes_images:
            return 1
        fits = []
        for count in range(1, 6):
            with torch.no_grad():
                video = self.pipeline.vae.decode(torch.zeros(1, self.channels, count, 2, 2), return_dict=False)[0]
            if video.shape[2] == (count - 1) * self.temporal_scale + 1:
                fits.append(count)
        if 1 not in fits or len(fits) < 2:
            self._add_unexplained(
                "the VAE makes another number of frames of its latents than one, and a fixed number for each other"
            )
            return self.temporal_scale
        return self.temporal_scale * (fits[1] - 1)

    def _find_scheduler(self) -> str:
        own = self.pipeline.scheduler
        if type(own).__name__ != "FlowMatchEulerDiscreteScheduler":
            for run in self.runs:
                (call, *more) = run.set_timesteps
                if more or set(call.given) - {"num_inference_steps", "device"}:
                    self._add_unexplained(f"the scheduler's timesteps are set by {', '.join(call.given)}")
            return ""
        shift = own.config["shift"]
        settings = [GenerationSettings(num_inference_steps=run.steps, flow_shift=shift) for run in self.runs]
        for name in ("euler", "euler_from_one"):
            sigmas = [getattr(schedulers, name)(each).sigmas for each in settings]
            if all(agrees(each, run.sigmas) for each, run in zip(sigmas, self.runs, strict=True)):
                return name
        self._add_unexplained(
            f"the sigmas {self.runs[0].sigmas} are none of families/shared/schedulers.py: a shift that depends on the "
            "size?"
        )
        return "euler"


def _embedding_name(output: EncoderOutput, value: torch.Tensor, known: Sequence[Embedding]) -> str:
    base = "text_mask" if output.expression == "attention_mask" else "text" if value.ndim == 3 else "pooled"
    count = sum(re.fullmatch(rf"{base}(_\d+)?", each.name) is not None for each in known)
    return f"{base}_{count + 1}" if count else base


def _cast_to_dtype(value: torch.Tensor) -> str:
    """The call that converts a tensor to the kind of dtype that this value has."""
    if value.is_floating_point():
        return ".to(dtype)"
    return ".bool()" if value.dtype == torch.bool else ".int()"


def _has_rows(rows: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a value is the row of the prompt, of the negative prompt, or both in either order."""
    # Our own order is the prompt first, whatever the pipeline's is.
    return any(agrees(each, value) for each in (rows[:1], rows[1:], rows, rows.flip(0)))


def _literal(value: Any) -> str | None:
    text = repr(value)
    is_simple = value is None or isinstance(value, (bool, int, float, str, dict, list, tuple))
    return text if is_simple and "tensor(" not in text else None


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_describe, value))})"
    return repr(value)
