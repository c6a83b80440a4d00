"""Second stage: text encoder and transformer together, by flow matching on the VAE's latents."""

import copy
import logging
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from torch import Tensor, nn
from transformers import UMT5EncoderModel

from tools.demo_model import long_clips
from tools.demo_model.captions import BACKGROUNDS, COLOURS, MOTIONS, SHAPES, TRAINING_TRIPLES, Attributes, paraphrase
from tools.demo_model.clips import ClipBatch, Tracks, draw, sample_training
from tools.demo_model.learning_rate import schedule
from tools.demo_model.model import FLOW_SHIFT, new_text_encoder, new_tokenizer, new_transformer
from tools.demo_model.shortcuts import encode_latents, fold_padding, take_whole_clips

logger = logging.getLogger(__name__)
PLAIN_BACKGROUNDS = [list(BACKGROUNDS).index(name) for name in ("black", "white")]
TOKENS = 32  # rows of a caption in training; the longest of the grammar has 22


@dataclass(frozen=True)
class VideoTraining:
    steps: int = 7325
    batch: int = 1536
    rate: float = 1e-3
    warmup: int = 500
    layers: int = 6
    pool: int = 100_000  # clips, encoded once: 1 GB of latents
    # Windows of long videos, encoded once; with any, every second step is theirs, with as many tokens as the others.
    long: int = 0
    centred: float = 0.0  # share of clips that begin in the middle
    spinning: float = 0.0  # share of clips that spin, beside those that do by chance
    first: float = 0.0  # extra weight of the first latent frame, which one frame of the video hangs on alone
    phrases: int = 96  # captions for each triple and background
    unconditional: float = 0.1  # share of empty captions, for classifier-free guidance
    ema: float = 0.9995
    decay: float = 0.01
    freeze_text: bool = False  # the text encoder stays as it is, for the sake of the sibling that was trained on it
    compiled: bool = True
    # The rate falls to its end, and the training ends, in this time at the latest; drawing the clips counts.
    seconds: float = math.inf
    seed: int = 1


class TextToVideo(nn.Module):
    """Both trained parts in one module, so that they share optimizer, average and checkpoint."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.text_encoder = new_text_encoder()
        self.transformer = new_transformer(layers)

    def forward(self, noisy: Tensor, timestep: Tensor, tokens: Tensor) -> Tensor:
        mask = (tokens != 0).long()
        embeds = self.text_encoder(tokens, mask).last_hidden_state
        embeds = embeds * mask[..., None]  # the pipeline puts zeros behind the end
        return self.transformer(noisy, timestep, embeds, return_dict=False)[0]


class Trainer:
    """Everything that a checkpoint must hold to go on as if nothing had happened, except the pool of latents."""

    def __init__(self, settings: VideoTraining, vae: AutoencoderKLWan, device: str, scratch: Path) -> None:
        self.settings, self.device = settings, device
        self._began = time.monotonic()
        torch.manual_seed(settings.seed)
        self.model = self._new_model().to(device)
        if settings.freeze_text:
            self.model.text_encoder.requires_grad_(False)
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        fold_padding(self.model.transformer, TOKENS)
        if settings.compiled and device == "cuda":
            self.model.transformer.compile_repeated_blocks(fullgraph=True, dynamic=False)
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.trained, lr=settings.rate, betas=(0.9, 0.98), weight_decay=settings.decay, fused=True
        )
        self.generator = torch.Generator(device).manual_seed(settings.seed)
        self.step = 0
        self.pool = self._pool(vae, scratch)
        self.long_pool = self._long_pool(vae, scratch) if settings.long else None
        self.captions = _captions(settings).to(device)

    def _new_model(self) -> nn.Module:
        return TextToVideo(self.settings.layers)

    def start_from(self, model: Path) -> None:
        """Take the weights of a saved model, in whichever precision it has them, instead of random ones."""
        for name, part in self._trained_parts(model).items():
            for mine in (self.model, self.average):
                mine.get_submodule(name).load_state_dict(part.float().state_dict())

    def _trained_parts(self, model: Path) -> dict[str, nn.Module]:
        return {
            "text_encoder": UMT5EncoderModel.from_pretrained(model / "text_encoder"),
            "transformer": WanTransformer3DModel.from_pretrained(model / "transformer"),
        }

    def run(self, until: float) -> bool:
        """Train to the last step or until ``time.monotonic()`` passes ``until``; says whether it is done."""
        settings = self.settings
        began, first = time.monotonic(), self.step
        running = torch.zeros((), device=self.device)
        while self.step < settings.steps:
            passed = (time.monotonic() - self._began) / settings.seconds
            if passed >= 1:
                break
            running += self._advance(passed)
            self.step += 1
            if self.step % 200 == 0 or self.step == settings.steps:
                rate = (self.step - first) * settings.batch / (time.monotonic() - began)
                spent = time.monotonic() - began
                loss = running / (self.step % 200 or 200)
                logger.info("step %d: loss %.4f, %.0f s, %.0f clips/s", self.step, loss, spent, rate)
                running.zero_()
                if time.monotonic() > until:
                    return self.step == settings.steps
        return True

    def _advance(self, passed: float) -> Tensor:
        settings, model, generator = self.settings, self.model, self.generator
        factor = schedule(self.step, settings.steps, settings.warmup, passed)
        for group in self.optimizer.param_groups:
            group["lr"] = settings.rate * factor
        given = self._batch()
        clean, noise, begins = given.pop("latents"), given.pop("noise"), given.pop("begins")
        # Evenly spread over the steps that the shifted scheduler takes, one from each slice of the range.
        spread = torch.rand(len(clean), generator=generator, device=self.device)
        spread = (spread + torch.arange(len(clean), device=self.device)) / len(clean)
        sigma = FLOW_SHIFT * spread / (1 + (FLOW_SHIFT - 1) * spread)
        mix = sigma.view(-1, 1, 1, 1, 1)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            predicted = model((1 - mix) * clean + mix * noise, 1000 * sigma, **given)
        error = (predicted.float() - (noise - clean)).square()
        # What stands first in a window from the middle is blended from other windows: only a video's own first latent
        # is learned there, which holds one frame and not four.
        weight = torch.ones_like(error[:, :1])
        if clean.shape[2] > long_clips.CLIP:
            # Those of a clip's length are each unlike the later ones, which are all alike, and there are few of them.
            weight[:, :, : long_clips.CLIP] += settings.first * begins.view(-1, 1, 1, 1, 1)
            weight[:, :, 0] *= begins.view(-1, 1, 1, 1)
        else:
            weight[:, :, 0] += settings.first
        loss = (weight * error).mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        ema = min(settings.ema, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(model.parameters()), 1 - ema)
        return loss.detach()

    def _batch(self) -> dict[str, Tensor]:
        """What the model is given, the latents without noise, the noise, and whether they are a video's beginning."""
        settings, generator, device = self.settings, self.generator, self.device
        pool, count = self.pool, settings.batch
        if self.long_pool is not None and self.step % 2:
            pool, count = self.long_pool, settings.batch * long_clips.CLIP // long_clips.WINDOW

        def pick(high: int) -> Tensor:
            return torch.randint(high, (count,), generator=generator, device=device)

        chosen = pick(len(pool["latents"]))
        given = {name: values[chosen] for name, values in pool.items()}
        triple, background = given.pop("attributes").unbind(1)
        noise = torch.randn(given["latents"].shape, generator=generator, device=device)
        places = given.pop("places", None)
        if places is None:
            begins = torch.ones(count, dtype=torch.bool, device=device)
        else:
            begins = places[:, 0] == 0
            repeated = long_clips.repeat_noise(noise, places, generator)
            noise = torch.where((pick(2) == 0).view(-1, 1, 1, 1, 1), noise, repeated)
        # Half of the captions say nothing of the background: entry 0.
        unnamed = pick(2) == 0
        if places is not None:
            # On gray or brown, a long video's caption says so: windows that choose for themselves mistake one for the
            # other.
            unnamed &= torch.isin(background, torch.tensor(PLAIN_BACKGROUNDS, device=device))
        background = torch.where(unnamed, 0, background + 1)
        tokens = self.captions[triple, background, pick(settings.phrases)].long()
        silent = torch.rand(count, generator=generator, device=device) < settings.unconditional
        empty = torch.zeros(TOKENS, dtype=torch.long, device=device)
        empty[0] = 1  # "" is the end mark alone
        given = {name: values.float() for name, values in given.items()}
        return given | {"noise": noise, "begins": begins, "tokens": torch.where(silent[:, None], empty, tokens)}

    def _pool(self, vae: AutoencoderKLWan, scratch: Path) -> dict[str, Tensor]:
        """By name, one row a clip: `attributes` (the indices of its triple and background) and all of `_encode`."""
        settings, device = self.settings, self.device
        shares = f"{settings.centred}-{settings.spinning}-{settings.seed}"
        file = scratch / f"{type(settings).__name__}-{settings.pool}-{shares}.pt"
        if file.exists():
            return torch.load(file, map_location=device, weights_only=True)
        began = time.monotonic()
        fast = copy.deepcopy(vae)
        take_whole_clips(fast)
        generator = torch.Generator(device).manual_seed(settings.seed + 1000)
        parts = []
        chunk = min(256, settings.pool)
        for _ in range(0, settings.pool, chunk):
            batch = sample_training(chunk, generator, settings.centred, settings.spinning)
            parts.append({"attributes": _numbers(batch), **self._encode(fast, draw(batch))})
        pool = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        _write(pool, file)
        logger.info("%d clips drawn and encoded in %.0f s", len(pool["attributes"]), time.monotonic() - began)
        return pool

    def _long_pool(self, vae: AutoencoderKLWan, scratch: Path) -> dict[str, Tensor]:
        """`attributes` and `latents` of windows of long videos, and the `places` of the latents in them."""
        file = scratch / f"windows-{self.settings.long}-{self.settings.seed}.pt"
        if file.exists():
            return torch.load(file, map_location=self.device, weights_only=True)
        began = time.monotonic()
        fast = copy.deepcopy(vae)
        take_whole_clips(fast)
        generator = torch.Generator(self.device).manual_seed(self.settings.seed + 2000)
        windows = long_clips.sample_windows(self.settings.long, generator)
        latents = long_clips.encode(fast, windows).bfloat16()
        logger.info("%d windows of long videos drawn and encoded in %.0f s", len(latents), time.monotonic() - began)
        pool = {"attributes": _numbers(windows.tracks), "latents": latents, "places": windows.latents}
        _write(pool, file)
        return pool

    def _encode(self, vae: AutoencoderKLWan, video: Tensor) -> dict[str, Tensor]:
        """`latents` [N, z, f, h, w] as bfloat16, and what else the model is given of a clip."""
        return {"latents": encode_latents(vae, video).bfloat16().contiguous()}

    def save(self, file: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "step": self.step,
        }
        _write(state, file)

    def load(self, file: Path) -> None:
        state = torch.load(file, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"].cpu())
        self.step = state["step"]


def _write(content: dict, file: Path) -> None:
    """All of it or nothing: a run may end in the middle."""
    partial = file.with_suffix(".partial")
    torch.save(content, partial)
    partial.replace(file)


def _numbers(clips: ClipBatch | Tracks) -> Tensor:
    """[B, 2]: the place of the triple in TRAINING_TRIPLES, and that of the background."""
    device = clips.colour.device
    places = torch.zeros(len(COLOURS), len(SHAPES), len(MOTIONS), dtype=torch.long, device=device)
    for number, (colour, shape, motion) in enumerate(TRAINING_TRIPLES):
        places[list(COLOURS).index(colour), SHAPES.index(shape), MOTIONS.index(motion)] = number
    return torch.stack([places[clips.colour, clips.shape, clips.motion], clips.background], 1)


def _captions(settings: VideoTraining) -> Tensor:
    """Tokens [triple, background, phrase, TOKENS]; background 0 is a caption that names none."""
    rng = random.Random(settings.seed)
    tokenizer = new_tokenizer()
    texts = [
        _with_unknown_word(paraphrase(Attributes(*triple, background), rng), rng)
        for triple in TRAINING_TRIPLES
        for background in (None, *BACKGROUNDS)
        for _ in range(settings.phrases)
    ]
    tokens = tokenizer(texts, padding="max_length", max_length=TOKENS, truncation=False, return_tensors="pt")
    shape = len(TRAINING_TRIPLES), 1 + len(BACKGROUNDS), settings.phrases, TOKENS
    return tokens.input_ids.view(shape).to(torch.int16)


def _with_unknown_word(caption: str, rng: random.Random) -> str:
    """Now and then a word that is not in the vocabulary, so that the model has met one."""
    words = caption.split()
    if rng.random() < 0.1:
        words.insert(rng.randrange(len(words) + 1), "<unk>")
    return " ".join(words)
