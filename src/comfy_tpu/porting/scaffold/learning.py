"""How a pipeline calls its parts, learned from two runs of a small one. What nothing explains is said in a sentence."""

from __future__ import annotations

import html
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import ftfy
import torch

from comfy_tpu.errors import GUIDE, UnsupportedError
from comfy_tpu.families.shared.ported import as_frames, in_vae_scale
from comfy_tpu.pipeline.noise import initial_noise
from comfy_tpu.porting.scaffold import hypotheses
from comfy_tpu.porting.scaffold.hypotheses import LAYOUTS, READINGS, Layout, Reading, agrees, first_that_holds
from comfy_tpu.porting.scaffold.pipelines import PROMPT_ALONE, Source, image_arguments
from comfy_tpu.porting.scaffold.runs import (
    Embedding,
    Learned,
    Run,
    batch_of,
    cast,
    described,
    embedding_name,
    euler_scheduler,
    first_text,
    literal,
    tensor,
)
from comfy_tpu.porting.scaffold.small import TOKENS, first_line, no_sizes, spatial_scale
from comfy_tpu.porting.scaffold.watching import Call, Watched, watch

_CLEANING = {"re": re, "html": html, "ftfy": ftfy}
GUIDANCE = 4.0
PROMPTS = (" a RED circle  and a blue", "A circle moving left &amp; a red")
"""With what a pipeline may clean away: capitals, spaces, HTML."""
NEGATIVE = ("black background", "blue")
_SIZES = ((6, 10), (8, 6))
"""Height and width in latents of the two runs."""
_FRAMES = (9, 17)
_STEPS = (3, 2)

Case = tuple[dict[str, Any], dict[str, Any]]
"""Names that an expression may use, and what the transformer was given."""
Tokens = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Ids and masks of the prompt and the negative prompt, by text encoder."""


class Learner:
    """Finds the expressions by which a pipeline calls its parts."""

    def __init__(self, source: Source, pipeline: Any) -> None:
        self.source = source
        self.pipeline = pipeline
        self.parameters = inspect.signature(type(pipeline).__call__).parameters
        self.unexplained: list[str] = []
        self.channels = int(pipeline.vae.config.get("latent_channels") or pipeline.vae.config.get("z_dim"))
        self.scale = spatial_scale(pipeline.vae)
        self.makes_images = "num_frames" not in self.parameters
        self.calls: tuple[Call, Call]
        """The first calls of the transformer and of the VAE's decode."""
        self.layouts = [each for each in LAYOUTS if self.makes_images or each.videos]

    def learn(self) -> Learned:
        layout, temporal = self._layout()
        runs = [self._run(number, layout, temporal) for number in (0, 1)]
        self.calls = runs[0].watched.transformer[0], runs[0].watched.decodes[0]
        self._check_start(runs, layout)
        clean = self._clean(runs)
        rows = [self._tokens(run, clean) for run in runs]
        arguments, embeddings = self._arguments(runs, rows, layout)
        answer = self._answer(runs, layout)
        statistics, vae_layout = self._vae(runs, layout)
        self._check_pixels(runs)
        return Learned(
            makes_images=self.makes_images,
            layout=layout,
            arguments=arguments,
            embeddings=embeddings,
            clean=clean,
            answer=answer,
            statistics=statistics,
            vae_layout=vae_layout,
            spatial_scale=self.scale,
            temporal_scale=temporal,
            frames_multiple=self._frames_multiple(temporal),
            scheduler=self._scheduler(runs),
            unexplained=self.unexplained,
            lengths=self._lengths(runs),
        )

    def _call(self, number: int, **more: Any) -> tuple[dict[str, int], Watched]:
        height, width = _SIZES[number]
        sizes = {"height": height * self.scale, "width": width * self.scale}
        if not self.makes_images:
            sizes["num_frames"] = _FRAMES[number]
        chosen: dict[str, Any] = {**sizes, "num_inference_steps": _STEPS[number], "guidance_scale": GUIDANCE}
        if "max_sequence_length" in self.parameters:
            chosen["max_sequence_length"] = TOKENS
        chosen |= {name: False for name in ("use_resolution_binning", "clean_caption") if name in self.parameters}
        try:
            watched = watch(self.pipeline, prompt=PROMPTS[number], negative_prompt=NEGATIVE[number], **chosen, **more)
        except Exception as error:
            images = image_arguments(self.source)
            why = f"it may want {' or '.join(images)}, {PROMPT_ALONE}" if images else no_sizes(self.source)
            raise UnsupportedError(
                f"a small {self.source.name} does not run ({type(error).__name__}: {first_line(error)}); {why}"
            ) from error
        return sizes, watched

    def _layout(self) -> tuple[Layout, int]:
        """By the shape of what the first step is given."""
        sizes, watched = self._call(0, generator=torch.Generator().manual_seed(0))
        shape = tuple(watched.steps[0].given["sample"].shape[1:])
        height, width = sizes["height"] // self.scale, sizes["width"] // self.scale
        scales = (1,) if self.makes_images else (4, 8, 2, 1)
        for temporal in scales:
            frames = (sizes.get("num_frames", 1) - 1) // temporal + 1
            for layout in self.layouts:
                if shape == layout.shape(self.channels, frames, height, width):
                    return layout, temporal
        raise UnsupportedError(
            f"the latents of {self.source.name} have shape {shape} at {sizes}, which is none of "
            f"{', '.join(each.name for each in self.layouts)}; write the family by hand, {GUIDE} says how"
        )

    def _run(self, number: int, layout: Layout, temporal: int) -> Run:
        height, width = _SIZES[number]
        frames = 1 if self.makes_images else (_FRAMES[number] - 1) // temporal + 1
        noise = initial_noise((1, self.channels, frames, height, width), seed=number)
        _, watched = self._call(number, latents=layout.to(noise))
        return Run(height, width, frames, _STEPS[number], PROMPTS[number], NEGATIVE[number], watched, noise)

    def _check_start(self, runs: list[Run], layout: Layout) -> None:
        for run in runs:
            if not agrees(run.watched.steps[0].given["sample"], layout.to(run.latents)):
                self._say(
                    "the first sample is not the noise that it was given: the scheduler or the pipeline scales it"
                )
                return

    def _say(self, sentence: str) -> None:
        if sentence not in self.unexplained:
            self.unexplained.append(sentence)

    def _clean(self, runs: list[Run]) -> str:
        texts = [
            first_text(call.given["text"])
            for run in runs
            for calls in list(run.watched.texts.values())[:1]
            for call in calls[:1]
        ]
        cases = [({**_CLEANING, "text": run.prompt}, text) for run, text in zip(runs, texts, strict=False)]
        found = first_that_holds(hypotheses.CLEANED, cases) if len(cases) == len(runs) else None
        if found is None:
            self._say(f"the prompt {runs[0].prompt!r} becomes {texts[0] if texts else None!r} before it is tokenized")
        return found or "text"

    def _tokens(self, run: Run, clean: str) -> Tokens:
        """As our own pipeline makes them."""
        found = {}
        for encoder in self.source.encoders:
            tokenizer = getattr(self.pipeline, self.source.tokenizer(encoder))
            texts = [hypotheses.evaluated(clean, {**_CLEANING, "text": text}) for text in (run.prompt, run.negative)]
            calls = run.watched.encoders[encoder]
            length = calls[0].given["input_ids"].shape[1]
            tokens = tokenizer(texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
            seen = torch.cat([call.given["input_ids"] for call in calls])
            for row in tokens.input_ids:
                if not bool((seen == row).all(dim=1).any()):
                    self._say(f"the {encoder} reads other tokens than its tokenizer makes of the prompt alone")
                    break
            found[encoder] = (tokens.input_ids, tokens.attention_mask)
        return found

    def _lengths(self, runs: list[Run]) -> dict[str, int | None]:
        found: dict[str, int | None] = {}
        for encoder in self.source.encoders:
            length = int(runs[0].watched.encoders[encoder][0].given["input_ids"].shape[1])
            found[encoder] = None if "max_sequence_length" in self.parameters and length == TOKENS else length
        return found

    def _arguments(
        self, runs: list[Run], tokens: list[Tokens], layout: Layout
    ) -> tuple[dict[str, str], list[Embedding]]:
        cases = [case for run in runs for case in self._cases(run, layout)]
        arguments: dict[str, str] = {}
        embeddings: list[Embedding] = []
        for name in cases[0][1]:
            wanted = [(names, given[name]) for names, given in cases]
            if name == "return_dict" or all(value is None for _, value in wanted):
                continue
            expression = self._expression(wanted) or self._computed(wanted, runs)
            if expression is None:
                embedding = self._embedding(name, cases, runs, tokens, embeddings)
                if embedding is not None:
                    embeddings.append(embedding)
                    expression = f"{embedding.name}{embedding.cast}"
            if expression is None:
                shapes = sorted({described(value) for _, value in wanted})
                self._say(f"the transformer is given {name}, {' or '.join(shapes)}, and nothing tried says what it is")
                expression = f'unexplained("{name}")'
            arguments[name] = expression
        return arguments, embeddings

    def _cases(self, run: Run, layout: Layout) -> list[Case]:
        """Every call of the transformer."""
        found = []
        for step, calls in run.watched.calls_by_step():
            sample = layout.of(step.given["sample"], run.height, run.width)
            for call in calls:
                batch = batch_of(call)
                timestep = torch.as_tensor(step.given["timestep"]).reshape(1).float()
                names = {"timestep": timestep, "batch": batch, "height": run.height, "width": run.width}
                names["latents"] = sample.expand(batch, -1, -1, -1, -1)
                found.append((names, call.given))
        return found

    def _expression(self, wanted: Sequence[tuple[Mapping[str, Any], Any]]) -> str | None:
        values = [value for _, value in wanted]
        if all(isinstance(value, torch.Tensor) for value in values):
            return first_that_holds((*(each.there for each in self.layouts), *hypotheses.TIMESTEPS), wanted)
        written = {literal(value) for value in values}
        if len(written) == 1:
            return written.pop()
        return first_that_holds(hypotheses.SIZES, wanted)

    def _computed(self, wanted: Sequence[tuple[Mapping[str, Any], Any]], runs: list[Run]) -> str | None:
        """By a method of the pipeline: found by its answer, then called as it was."""
        if not isinstance(wanted[0][1], (torch.Tensor, tuple, list)):
            return None
        for method, calls in runs[0].watched.methods.items():
            others = runs[1].watched.methods[method]
            if not calls or not others or not agrees(calls[0].result, wanted[0][1]):
                continue
            first = [(next(names for names, _ in wanted if names["height"] == run.height)) for run in runs]
            given = [list(each[0].given.values()) for each in (calls, others)]
            arguments = [self._argument(first, values) for values in zip(*given, strict=True)]
            if None in arguments:
                continue
            facts = self._facts(method)
            parts = [f'"{self.source.name}"', f'"{method}"', "module", repr(facts), *(str(each) for each in arguments)]
            expression = f"by_pipeline({', '.join(parts)})"
            if first_that_holds(
                (expression,), [({**names, "module": self.pipeline.transformer}, v) for names, v in wanted]
            ):
                return expression
        return None

    def _argument(self, names: list[Mapping[str, Any]], values: Sequence[Any]) -> str | None:
        if all(isinstance(value, torch.device) for value in values):
            return "latents.device"
        if all(isinstance(value, torch.dtype) for value in values):
            return "torch.float32"
        sizes = (*hypotheses.SIZES, f"{self.scale} * height", f"{self.scale} * width", "batch")
        found = first_that_holds(sizes, list(zip(names, values, strict=True)))
        return found or (literal(values[0]) if values[0] == values[1] else None)

    def _facts(self, method: str) -> dict[str, Any]:
        """Numbers of the pipeline that the method reads."""
        read = set(re.findall(r"self\.(\w+)", inspect.getsource(getattr(type(self.pipeline), method))))
        simple = {name: value for name, value in vars(self.pipeline).items() if isinstance(value, (int, float, str))}
        return {name: value for name, value in simple.items() if name in read}

    def _embedding(
        self,
        name: str,
        cases: list[Case],
        runs: list[Run],
        tokens: list[Tokens],
        known: list[Embedding],
    ) -> Embedding | None:
        first = [next(case for case in cases if case[0]["height"] == run.height) for run in runs]
        for encoder in self.source.encoders:
            module = getattr(self.pipeline, encoder)
            for reading in READINGS[self.source.parts[encoder].__name__]:
                if all(
                    self._reads(reading, module, token[encoder], case, name)
                    for token, case in zip(tokens, first, strict=True)
                ):
                    value = first[0][1][name]
                    label = embedding_name(value, reading, known)
                    return Embedding(label, encoder, reading, name, cast(value, reading))
        return None

    def _reads(
        self, reading: Reading, module: Any, tokens: tuple[torch.Tensor, torch.Tensor], case: Case, name: str
    ) -> bool:
        value = case[1][name]
        if not isinstance(value, torch.Tensor) or value.shape[:1] not in ((1,), (2,)):
            return False
        with torch.no_grad():
            rows = reading.compute(module, *tokens)
        if value.shape[0] == 1:
            return any(agrees(rows[at : at + 1], value) for at in (0, 1))
        # Both orders: our own is the prompt first, whatever the pipeline's is.
        return agrees(rows, value) or agrees(rows.flip(0), value)

    def _answer(self, runs: list[Run], layout: Layout) -> str:
        """The transformer's answer, brought to our latents: by the guided sum that the scheduler was given."""
        forms = [(form, each) for form in hypotheses.ANSWERS for each in self.layouts]
        for form, each in forms:
            try:
                if all(self._guided(run, form, each, layout) for run in runs):
                    return each.back.format(form.format("answer")) if each.back != "{}" else form.format("answer")
            except (RuntimeError, ValueError, IndexError):
                continue
        self._say(
            f"the scheduler is given {described(runs[0].watched.steps[0].given['model_output'])}, which is no guided "
            f"sum of the transformer's answers {described(tensor(runs[0].watched.transformer[0].result))}"
        )
        return 'unexplained("answer")'

    def _guided(self, run: Run, form: str, each: Layout, layout: Layout) -> bool:
        for step, calls in run.watched.calls_by_step():
            rows = torch.cat([tensor(call.result) for call in calls]).float()
            found = hypotheses.evaluated(form.format("answer"), {"answer": rows})
            latents = each.of(found, run.height, run.width)
            wanted = layout.of(step.given["model_output"].float(), run.height, run.width)
            if latents.shape[0] != 2:
                return False
            one, two = latents.split(1)
            if not (agrees(one + GUIDANCE * (two - one), wanted) or agrees(two + GUIDANCE * (one - two), wanted)):
                return False
        return True

    def _vae(self, runs: list[Run], layout: Layout) -> tuple[str, Layout]:
        config = dict(self.pipeline.vae.config)
        for layout_there in self.layouts:
            for expression, keys in hypotheses.STATISTICS.items():
                if any(config.get(key) is None for key in keys):
                    continue
                statistics = hypotheses.evaluated(expression, {"config": config, "channels": self.channels})
                try:
                    if all(self._decodes(run, layout, layout_there, statistics) for run in runs):
                        return expression, layout_there
                except (RuntimeError, ValueError, IndexError):
                    continue
        call = runs[0].watched.decodes[0]
        self._say(
            f"the VAE is given {described(next(iter(call.given.values())))}, and no scale of the last latents is that"
        )
        return '[unexplained("latent statistics")], []', self.layouts[0]

    def _decodes(self, run: Run, layout: Layout, there: Layout, statistics: tuple[list[float], list[float]]) -> bool:
        (call,) = run.watched.decodes
        given = dict(call.given)
        given.pop("return_dict", None)
        if len(given) != 1:
            return False
        last = layout.of(tensor(run.watched.steps[-1].result).float(), run.height, run.width)
        return agrees(there.to(in_vae_scale(last, statistics)), next(iter(given.values())))

    def _check_pixels(self, runs: list[Run]) -> None:
        for run in runs:
            frames = as_frames(tensor(run.watched.decodes[0].result))[0].permute(0, 3, 1, 2)
            if not agrees(frames, run.watched.output.reshape(-1, *run.watched.output.shape[-3:]).float()):
                noun = "image" if self.makes_images else "video"
                self._say(f"the {noun} is another than what the VAE decodes, brought to 0..1")
                return

    def _frames_multiple(self, temporal: int) -> int:
        """How many frames a video may have, by what the VAE makes of a few latents."""
        if self.makes_images:
            return 1
        vae, good = self.pipeline.vae, []
        for count in range(1, 6):
            with torch.no_grad():
                made = vae.decode(torch.zeros(1, self.channels, count, 2, 2), return_dict=False)[0]
            if made.shape[2] == (count - 1) * temporal + 1:
                good.append(count)
        if 1 not in good or len(good) < 2:
            self._say(
                "the VAE makes another number of frames of its latents than one, and a fixed number for each other"
            )
            return temporal
        return temporal * (good[1] - 1)

    def _scheduler(self, runs: list[Run]) -> str:
        """A function of families/shared/schedulers.py; empty for the pipeline's own class."""
        own = self.pipeline.scheduler
        if type(own).__name__ != "FlowMatchEulerDiscreteScheduler":
            for run in runs:
                (call, *more) = run.watched.set_timesteps
                if more or set(call.given) - {"num_inference_steps", "device"}:
                    self._say(f"the scheduler's timesteps are set by {', '.join(call.given)}")
            return ""
        found = euler_scheduler(own.config["shift"], runs)
        if found is None:
            sigmas = runs[0].watched.sigmas
            self._say(
                f"the sigmas {sigmas} are none of families/shared/schedulers.py: a shift that depends on the size?"
            )
        return found or "euler"
