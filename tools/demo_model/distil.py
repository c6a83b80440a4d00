"""Distil the demo model into four steps without guidance, as a LoRA. One CPU core is enough, and a GPU is quicker.

    python -m tools.demo_model.distil record --work build/distil
    python -m tools.demo_model.distil train --work build/distil
    python -m tools.demo_model.distil save --work build/distil --output src/comfy_tpu/assets/demo/lora/4step.safetensors

The teacher is the model with guidance, in several small steps for each of the student's four. ``record`` writes what it
makes of noise and captions of the training's grammar: the latents at the ends of the four segments. ``train`` teaches
the LoRA to cross a segment in one step of one forward. With ``--from-student`` every segment begins where the student
itself arrives, so that it learns to mend what it does. Both go on where they were stopped.
"""

import argparse
import itertools
import logging
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import UMT5EncoderModel

from comfy_tpu.families.presets import METADATA_KEY
from tools.demo_model.captions import BACKGROUNDS, TRAINING_TRIPLES, Attributes, paraphrase
from tools.demo_model.learning_rate import schedule
from tools.demo_model.model import FLOW_SHIFT, LATENT_CHANNELS, new_tokenizer
from tools.demo_model.shortcuts import fold_padding
from tools.demo_model.train_video import TOKENS

logger = logging.getLogger("tools.demo_model")
DEMO = Path("src/comfy_tpu/assets/demo")
LATENTS = (LATENT_CHANNELS, 5, 8, 8)
PRESET = "4step"
STEPS, SUBSTEPS = 4, 5
"""Of the student, and of the teacher in each of them: 20 in all, as the model is made for."""
GUIDANCE = 3.0
CHUNK = 64  # clips recorded at a time, and so the most that an interruption costs
RANKS = {"attn1": 3, "attn2": 2, "ffn": 3, "time_proj": 4}
"""By the part of a module's name. All models together may have 30 MB, which leaves 0.33 MB for the LoRA."""
DIFFERENCES = ("scale_shift_table", "norm_q.weight", "norm_k.weight", "norm2.weight", "norm2.bias")
"""Small tensors, by the end of their names, that are changed without a low rank."""


def shifted(progress: Tensor) -> Tensor:
    """The noise levels of a schedule that goes from 1 in equal steps."""
    left = 1 - progress
    return FLOW_SHIFT * left / (1 + (FLOW_SHIFT - 1) * left)


SIGMAS = shifted(torch.arange(STEPS + 1) / STEPS)


class Teacher:
    """The shipped model, with guidance."""

    def __init__(self, model: Path, device: str = "cpu") -> None:
        self.transformer = load_transformer(model, device)
        text_encoder = UMT5EncoderModel.from_pretrained(model / "text_encoder", dtype=torch.float32)
        self.text_encoder = text_encoder.eval().to(device)
        self.tokenizer = new_tokenizer()

    @torch.no_grad()
    def embed(self, captions: list[str]) -> Tensor:
        tokens = self.tokenizer(captions, padding="max_length", max_length=TOKENS, return_tensors="pt").input_ids
        tokens = tokens.to(self.text_encoder.device)
        mask = (tokens != 0).long()
        return self.text_encoder(tokens, mask).last_hidden_state * mask[..., None]

    def cross(self, latents: Tensor, embeds: Tensor, segment: int) -> Tensor:
        """The latents at the end of a segment: a two-step Adams-Bashforth method, begun by one of Heun's steps."""
        grid = shifted((segment + torch.arange(SUBSTEPS + 1) / SUBSTEPS) / STEPS)
        before: tuple[Tensor, Tensor] | None = None
        for sigma, after in itertools.pairwise(grid):
            step, velocity = after - sigma, self._velocity(latents, sigma, embeds)
            if before is None:
                ahead = self._velocity(latents + step * velocity, after, embeds) if after > 0 else velocity
                change = (velocity + ahead) / 2
            else:
                change = velocity + (step / before[0]) / 2 * (velocity - before[1])
            latents, before = latents + step * change, (step, velocity)
        return latents

    @torch.no_grad()
    def _velocity(self, latents: Tensor, sigma: Tensor, embeds: Tensor) -> Tensor:
        empty = self.embed([""]).expand_as(embeds)
        timestep = (1000 * sigma).expand(len(latents)).to(latents.device)
        guided, unguided = (self.transformer(latents, timestep, text, return_dict=False)[0] for text in (embeds, empty))
        return unguided + GUIDANCE * (guided - unguided)


class LoraLinear(nn.Module):
    """A linear layer that stays as it is, with a change of low rank and of its bias."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        self.bias = nn.Parameter(torch.zeros(base.out_features))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + nn.functional.linear(x @ self.down.T, self.up, self.bias)


class Student(nn.Module):
    """The teacher's transformer with a LoRA."""

    def __init__(self, model: Path, device: str = "cpu") -> None:
        super().__init__()
        self.transformer = load_transformer(model, device)
        self.base = {name: value.clone() for name, value in self.transformer.named_parameters()}
        for name, module in list(self.transformer.named_modules()):
            rank = next((rank for part, rank in RANKS.items() if part in name), 0)
            if isinstance(module, nn.Linear) and rank:
                parent, _, last = name.rpartition(".")
                setattr(self.transformer.get_submodule(parent), last, LoraLinear(module, rank).to(device))
        for name, parameter in self.transformer.named_parameters():
            if name.endswith(DIFFERENCES):
                parameter.requires_grad_(True)
        self.trained = {name: each for name, each in self.transformer.named_parameters() if each.requires_grad}

    def velocity(self, latents: Tensor, segment: Tensor, embeds: Tensor) -> Tensor:
        return self.transformer(latents, 1000 * SIGMAS.to(segment.device)[segment], embeds, return_dict=False)[0]

    @torch.no_grad()
    def rollout(self, latents: Tensor, embeds: Tensor) -> Iterator[Tensor]:
        """The latents after each step."""
        for step in range(STEPS):
            velocity = self.velocity(latents, torch.full((len(latents),), step, device=latents.device), embeds)
            latents = latents + (SIGMAS[step + 1] - SIGMAS[step]) * velocity
            yield latents

    def tensors(self) -> dict[str, Tensor]:
        """The LoRA under the names that ComfyUI's files have for changes, with diffusers' names of modules."""
        found = {}
        for name, value in self.trained.items():
            module, _, last = name.rpartition(".")
            if last in ("down", "up"):
                found[f"diffusion_model.{module}.lora_{last}.weight"] = value
            elif last == "bias" and isinstance(self.transformer.get_submodule(module), LoraLinear):
                found[f"diffusion_model.{module}.diff_b"] = value
            else:
                key = f"{module}.diff_b" if last == "bias" else f"{name.removesuffix('.weight')}.diff"
                found[f"diffusion_model.{key}"] = value - self.base[name]
        return {name: value.detach().bfloat16().cpu().contiguous() for name, value in found.items()}


def load_transformer(model: Path, device: str = "cpu") -> WanTransformer3DModel:
    transformer = WanTransformer3DModel.from_pretrained(model / "transformer").float()
    fold_padding(transformer, TOKENS)
    return transformer.eval().requires_grad_(False).to(device)


def record(work: Path, model: Path, clips: int, from_student: bool, device: str = "cpu") -> None:
    """Writes chunks of trajectories, each with `embeds`, the latents at the `begin` and the `end` of each segment."""
    teacher, student = Teacher(model, device), None
    if from_student:
        student = Student(model, device)
        _restore(student, work)
    kind = f"student-{_step_count(work)}" if from_student else "teacher"
    for chunk in range(clips // CHUNK):
        file = work / f"{kind}-{chunk:03d}.pt"
        if file.exists():
            continue
        began = time.monotonic()
        rng = random.Random(f"{kind}-{chunk}")
        embeds = teacher.embed([_caption(rng) for _ in range(CHUNK)])
        noise = torch.randn(CHUNK, *LATENTS, generator=torch.Generator().manual_seed(rng.randrange(2**40)))
        noise = noise.to(device)
        begin, end = [noise], []
        steps = student.rollout(noise, embeds) if student else iter(())
        for segment in range(STEPS):
            end.append(teacher.cross(begin[-1], embeds, segment))
            begin.append(next(steps, end[-1]))
        _write({"embeds": embeds, "begin": torch.stack(begin[:-1], 1), "end": torch.stack(end, 1)}, file)
        logger.info("%s: %d clips in %.0f s", file.name, CHUNK, time.monotonic() - began)


def _caption(rng: random.Random) -> str:
    background = rng.choice([None, *BACKGROUNDS]) if rng.random() < 0.6 else None
    return paraphrase(Attributes(*rng.choice(TRAINING_TRIPLES), background), rng)


def train(work: Path, model: Path, steps: int, batch: int, rate: float, seed: int, device: str = "cpu") -> None:
    """``steps`` more steps on everything that is recorded, the newest kind of it for half of them."""
    student = Student(model, device)
    parameters = list(student.trained.values())
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    average = [each.detach().clone() for each in parameters]
    done = _restore(student, work)
    last, first = done // steps * steps + steps, done // steps * steps
    if (work / "training.pt").exists():
        state = torch.load(work / "training.pt", map_location=device, weights_only=True)
        if done > first:
            optimizer.load_state_dict(state["optimizer"])
        average = state["average"]
        with torch.no_grad():
            for mine, saved in zip(parameters, state["weights"], strict=True):
                mine.copy_(saved)
    data, checks = _read_recorded(work, device)
    began, running = time.monotonic(), 0.0
    for step in range(done, last):
        generator = torch.Generator().manual_seed(seed + step)
        for group in optimizer.param_groups:
            group["lr"] = rate * schedule(step - first, steps, warmup=50)
        source = data[-1] if step % 2 else data[int(torch.randint(len(data), (), generator=generator))]
        clip = torch.randint(len(source["embeds"]), (batch,), generator=generator).to(device)
        segment = torch.randint(STEPS, (batch,), generator=generator).to(device)
        loss = _error(student, source, clip, segment).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        running += float(loss.detach())
        with torch.no_grad():
            torch._foreach_lerp_(average, parameters, 1 - min(0.998, (1 + step) / (10 + step)))
        if (step + 1) % 100 == 0 or step + 1 == last:
            _write(
                {"optimizer": optimizer.state_dict(), "average": average, "weights": parameters}, work / "training.pt"
            )
            _write({"step": step + 1, "average": dict(zip(student.trained, average, strict=True))}, work / "student.pt")
            spent, count = time.monotonic() - began, (step - done) % 100 + 1
            logger.info("step %d: loss %.4f, %.0f s", step + 1, running / count, spent)
            running = 0.0
        if (step + 1) % 500 == 0 or step + 1 == last:
            _report(model, work, checks, device)


def _error(student: Student, source: dict[str, Tensor], clip: Tensor, segment: Tensor) -> Tensor:
    begin, end = source["begin"][clip, segment], source["end"][clip, segment]
    sigmas = SIGMAS.to(segment.device)
    length = (sigmas[segment] - sigmas[segment + 1]).view(-1, 1, 1, 1, 1)
    predicted = student.velocity(begin, segment, source["embeds"][clip])
    return (predicted - (begin - end) / length).square().mean((1, 2, 3, 4))


def save(student: Student, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(student.tensors(), path, {METADATA_KEY: PRESET})


@torch.no_grad()
def _report(model: Path, work: Path, check: dict[str, Tensor], device: str = "cpu") -> None:
    """The averaged student on clips that are not trained on: errors by segment, and of whole runs."""
    student = Student(model, device)
    _restore(student, work)
    clips = torch.arange(len(check["embeds"]), device=device)
    errors = [float(_error(student, check, clips, torch.full_like(clips, each)).mean()) for each in range(STEPS)]
    *_, made = student.rollout(check["begin"][:, 0], check["embeds"])
    apart = (made - check["end"][:, -1]).flatten(1).norm(dim=1) / check["end"][:, -1].flatten(1).norm(dim=1)
    logger.info(
        "segments %s, whole runs differ by %.1f %%", [round(each, 4) for each in errors], 100 * float(apart.mean())
    )


def _read_recorded(work: Path, device: str) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """The recorded clips by kind, oldest first; and a chunk of the teacher's that is for checks alone."""
    kinds: dict[str, list[Path]] = {}
    for file in sorted(work.glob("*-???.pt"), key=lambda file: (file.stat().st_mtime, file.name)):
        kinds.setdefault(file.stem.rpartition("-")[0], []).append(file)
    chunks = [
        [torch.load(file, map_location=device, weights_only=True) for file in sorted(files)] for files in kinds.values()
    ]
    check = chunks[0].pop(0)
    return [{name: torch.cat([each[name] for each in kind]) for name in check} for kind in chunks if kind], check


def _restore(student: Student, work: Path) -> int:
    """Takes the averaged weights of the last training, and says how many steps it had."""
    if not (work / "student.pt").exists():
        return 0
    state = torch.load(work / "student.pt", map_location="cpu", weights_only=True)
    with torch.no_grad():
        for name, value in state["average"].items():
            student.trained[name].copy_(value)
    return state["step"]


def _step_count(work: Path) -> int:
    return torch.load(work / "student.pt", map_location="cpu", weights_only=True)["step"]


def _write(content: dict, file: Path) -> None:
    partial = file.with_suffix(".partial")
    torch.save(content, partial)
    partial.replace(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("record", "train", "save"))
    parser.add_argument("--output", type=Path, help="save: the file")
    parser.add_argument("--work", type=Path, required=True, help="where everything is kept")
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--clips", type=int, default=1536)
    parser.add_argument("--from-student", action="store_true")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    if arguments.stage == "save" and arguments.output is None:
        parser.error("save needs --output, the name of a file")
    work = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    handlers = [logging.StreamHandler(), logging.FileHandler(work / "distil.log")]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", handlers=handlers)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    if arguments.stage == "record":
        record(work, arguments.model, arguments.clips, arguments.from_student, arguments.device)
    elif arguments.stage == "train":
        train(work, arguments.model, arguments.steps, arguments.batch, arguments.rate, arguments.seed, arguments.device)
    else:
        student = Student(arguments.model, arguments.device)
        _restore(student, work)
        save(student, arguments.output)


if __name__ == "__main__":
    main()
