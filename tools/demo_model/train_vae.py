"""First stage: the VAE, on clips drawn as they are needed."""

import copy
import logging
import math
import time
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanAttentionBlock, WanResidualBlock
from torch import Tensor

from tools.demo_model import long_clips
from tools.demo_model.clips import draw, sample_training
from tools.demo_model.learning_rate import schedule
from tools.demo_model.long_decoding import LongClipPool, LongDecoding
from tools.demo_model.model import new_vae
from tools.demo_model.sheet import write_sheet
from tools.demo_model.shortcuts import (
    decode_whole,
    denormalise,
    encode_latents,
    encode_whole,
    take_whole_clips,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class VaeTraining:
    steps: int = 1349  # of the model as shipped; 20 dB after 300, 27 dB here, and still rising
    batch: int = 32
    rate: float = 6e-4  # 2e-3 is behind it after 300 steps
    warmup: int = 100
    # Weight of the KL term: smooth latents, and unused channels silent, at no visible cost in sharpness.
    kl: float = 1e-4
    # Squared error first of all: the median of what a pixel may show is the background, so under L1 alone objects
    # stayed away (18 dB after 2,000 steps, then also with a wide posterior). L1 and the edges sharpen what is there.
    absolute: float = 0.1
    edges: float = 0.1
    # Errors that change from frame to frame: in a slow motion, or none, a decoder's flicker is all that is seen.
    flicker: float = 0.0
    steady: float = 0.0  # the same, by the root mean square of each frame, which is what `find_seam` looks at
    objects: float = 4.0  # extra weight of the pixels that are not background
    first: float = 0.0  # extra weight of the first frame, whose latents hold no other frame
    centred: float = 0.0  # share of clips that begin in the middle
    spinning: float = 0.0  # share of clips that spin, beside those that do by chance
    # Of a decoder's training: parts of long clips (long_decoding.py), in a share of the steps.
    long_clips: int = 0
    long_share: float = 0.5
    long_latents: int = 41
    long_batch: int = 6
    long_frames: int = 48
    long_beginnings: float = 0.0
    long_noise: float = 0.05
    long_lasting: float = 0.0
    long_swapped: float = 0.0
    long_hard: float = 0.0
    long_measured: int = 1000  # steps between two measurements
    long_denoised_by: str = ""
    seconds: float = math.inf  # the rate falls to its end, and the training ends, in this time at the latest
    seed: int = 0


def train_vae(settings: VaeTraining, directory: Path, device: str, decoder_only: bool = False) -> float:
    """Train, measure the latents, save to ``directory``; returns the PSNR of reconstructions, in decibels.

    ``decoder_only`` goes on from the VAE in ``directory`` and leaves its latents as they are, so that a transformer
    trained on them stays valid.
    """
    torch.manual_seed(settings.seed)
    generator = torch.Generator(device).manual_seed(settings.seed)
    vae = AutoencoderKLWan.from_pretrained(directory) if decoder_only else _initialize(new_vae())
    vae.to(device)
    take_whole_clips(vae)
    if decoder_only:
        vae.encoder.requires_grad_(False)
        vae.quant_conv.requires_grad_(False)
    trained = [parameter for parameter in vae.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=settings.rate, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    began = time.monotonic()
    pool = LongClipPool(vae, _long_decoding(settings), generator) if decoder_only and settings.long_clips else None
    for step in range(settings.steps):
        passed = (time.monotonic() - began) / settings.seconds
        if passed >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = settings.rate * schedule(step, settings.steps, settings.warmup, passed)
        is_long = pool is not None and int((step + 1) * settings.long_share) > int(step * settings.long_share)
        if pool is not None and settings.long_hard and step % settings.long_measured == settings.long_measured - 1:
            pool.measure()
        kl = torch.zeros((), device=device)
        if pool is not None and is_long:
            video, decoded = pool.decode()
        else:
            video, decoded, kl = _reconstruct(vae, settings, generator)
        difference = decoded.float() - video
        loss = _distance(difference, video, settings, 0.0 if is_long else settings.first) + settings.kl * kl
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        if step % 300 == 0 or (pool is not None and step % 300 == 1):
            now = _decibels(difference.square().mean())
            spent = time.monotonic() - began
            logger.info(
                "vae step %d: loss %.4f, KL %.3f, PSNR %.1f dB, %.0f s", step, loss.item(), kl.item(), now, spent
            )
    if not decoder_only:
        _measure(vae, settings, generator)
    directory.mkdir(parents=True, exist_ok=True)
    vae.to("cpu").save_pretrained(directory, safe_serialization=True)
    vae = AutoencoderKLWan.from_pretrained(directory).to(device).eval()
    if pool is not None:
        _report_long(vae, generator)
    return _report(vae, directory, generator)


def _reconstruct(
    vae: AutoencoderKLWan, settings: VaeTraining, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """New clips, what the VAE makes of them, and how far their latents are from noise."""
    video = draw(sample_training(settings.batch, generator, settings.centred, settings.spinning)) * 2 - 1
    video = video.contiguous(memory_format=torch.channels_last_3d)
    with torch.autocast(video.device.type, torch.bfloat16, enabled=video.is_cuda):
        mean, log_variance = encode_whole(vae, video).float().chunk(2, dim=1)
        log_variance = log_variance.clamp(-30, 20)
        noise = torch.randn(mean.shape, generator=generator, device=video.device)
        decoded = decode_whole(vae, mean + noise * (0.5 * log_variance).exp())
    return video, decoded, 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).mean()


def _long_decoding(settings: VaeTraining) -> LongDecoding:
    return LongDecoding(**{field.name: getattr(settings, f"long_{field.name}") for field in fields(LongDecoding)})


def _initialize(vae: AutoencoderKLWan) -> AutoencoderKLWan:
    """Residual branches that begin at zero, and a posterior narrow enough for the decoder to see the latents at all."""
    for module in vae.modules():
        if isinstance(module, WanResidualBlock):
            torch.nn.init.zeros_(module.conv2.weight)
        elif isinstance(module, WanAttentionBlock):
            torch.nn.init.zeros_(module.proj.weight)
    vae.quant_conv.bias.data[vae.config.z_dim :] = -7.0
    return vae


def _distance(difference: Tensor, video: Tensor, settings: VaeTraining, first: float) -> Tensor:
    # The first corner is always background.
    drawn = (video - video[..., :1, :1]).abs().amax(dim=1, keepdim=True) > 0.05
    weight = 1 + settings.objects * drawn
    weight[:, :, :1] *= 1 + first
    pixels = (weight * (difference.square() + settings.absolute * difference.abs())).mean()
    across, down = difference[..., 1:] - difference[..., :-1], difference[..., 1:, :] - difference[..., :-1, :]
    later = difference[:, :, 1:] - difference[:, :, :-1]
    changes = settings.edges * (across.abs().mean() + down.abs().mean()) + settings.flicker * later.abs().mean()
    by_frame = (later.square().mean(dim=(1, 3, 4)) + 1e-6).sqrt()
    return pixels + changes + settings.steady * by_frame.mean()


def _decibels(mean_square: Tensor) -> float:
    return -10 * math.log10(float(mean_square.detach()) / 4)  # values span -1..1


@torch.no_grad()
def _measure(vae: AutoencoderKLWan, settings: VaeTraining, generator: torch.Generator) -> None:
    """Mean and deviation of every latent channel, into the config, as Wan has them there."""
    means = [encode_latents(vae, draw(sample_training(settings.batch, generator))) for _ in range(16)]
    by_channel = torch.cat(means).transpose(0, 1).flatten(1)
    deviation = by_channel.std(1)
    logger.info("latents: std %s", [round(value, 3) for value in deviation.tolist()])
    # A silent channel stays quiet: at unit variance the transformer would have to predict values that are not decoded.
    deviation = deviation.clamp(min=0.25 * float(deviation.max()))
    vae.register_to_config(
        latents_mean=[round(value, 4) for value in by_channel.mean(1).tolist()],
        latents_std=[round(value, 4) for value in deviation.tolist()],
    )


@torch.no_grad()
def _report_long(vae: AutoencoderKLWan, generator: torch.Generator) -> None:
    """PSNR of 225 frames, by sevenths."""
    clips = long_clips.sample_beginnings(32 if generator.device.type == "cuda" else 1, long_clips.LONGEST, generator)
    fast = copy.deepcopy(vae)
    take_whole_clips(fast)
    latents = long_clips.encode(fast, clips)
    decoded = torch.cat([vae.decode(denormalise(vae, some)).sample for some in latents.split(4)])
    error = (decoded - (draw(long_clips.frames_of(clips, 0, decoded.shape[2])) * 2 - 1)).square()
    parts = [round(_decibels(part.mean()), 2) for part in error.tensor_split(7, dim=2)]
    logger.info("VAE, as saved: %d frames, PSNR by sevenths %s dB", decoded.shape[2], parts)


@torch.no_grad()
def _report(vae: AutoencoderKLWan, directory: Path, generator: torch.Generator) -> float:
    """PSNR of clips encoded and decoded as the pipeline does it, in float32, frame by frame."""
    count = 64 if generator.device.type == "cuda" else 2
    video = draw(sample_training(count, generator)) * 2 - 1
    decoded = vae.decode(vae.encode(video).latent_dist.mode()).sample
    per_clip = F.mse_loss(decoded, video, reduction="none").mean(dim=(1, 2, 3, 4))
    values = [_decibels(value) for value in per_clip]
    logger.info("VAE, as saved: PSNR %.2f dB over %d clips, worst %.2f dB", sum(values) / count, count, min(values))
    pairs = torch.stack([video, decoded], 1).flatten(0, 1)[:16]
    write_sheet(directory.parent / "reconstructions.png", (pairs / 2 + 0.5).permute(0, 2, 3, 4, 1).cpu().numpy())
    return sum(values) / count
