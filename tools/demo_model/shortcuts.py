"""Two ways to train the same model faster. Both give what diffusers gives at inference; the tests hold them to it."""

import math
from types import MethodType

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, WanResample, WanRMS_norm
from torch import Tensor

PART_REACH = 18
"""Frames that the last two stages of a decoder with one residual block a stage (`num_res_blocks`) look back: two for
each of nine convolutions."""


def take_whole_clips(vae: AutoencoderKLWan) -> None:
    """Let the VAE's halves take all frames in one pass, without a feature cache, and in kernels that GPUs are good at.

    diffusers walks over the frames in chunks, which costs five times the kernel launches. A causal convolution over
    the whole clip gives the same; only the resampling in time treats the first frame apart. Give videos in the memory
    format channels_last_3d: then the steps between 3-D and 2-D below copy nothing.
    """
    replacements = {WanResample: _resample_whole, WanCausalConv3d: _convolve_in_2d, WanRMS_norm: _fused_norm}
    for module in vae.modules():
        if type(module) in replacements:
            module.forward = MethodType(replacements[type(module)], module)


def encode_whole(vae: AutoencoderKLWan, video: Tensor) -> Tensor:
    """Moments [B, 2z, f, h, w] of videos [B, 3, F, H, W] in -1..1."""
    return vae.quant_conv(vae.encoder(video))


@torch.no_grad()
def encode_latents(vae: AutoencoderKLWan, video: Tensor) -> Tensor:
    """Normalised latents of videos in 0..1, for a VAE that takes whole clips."""
    with torch.autocast(video.device.type, torch.bfloat16, enabled=video.is_cuda):
        video = (video * 2 - 1).contiguous(memory_format=torch.channels_last_3d)
        mean = encode_whole(vae, video)[:, : vae.config.z_dim].float()
    shift, scale = _statistics(vae, mean)
    return (mean - shift) / scale


def denormalise(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """Latents as the decoder takes them."""
    shift, scale = _statistics(vae, latents)
    return latents * scale + shift


def _statistics(vae: AutoencoderKLWan, like: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of the latents, by channel."""
    both = (vae.config.latents_mean, vae.config.latents_std)
    shift, scale = (torch.tensor(values, device=like.device).view(1, -1, 1, 1, 1) for values in both)
    return shift, scale


def decode_whole(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """Videos in about -1..1: not clamped, so that gradients pass."""
    return vae.decoder(vae.post_quant_conv(latents))


def decode_part(vae: AutoencoderKLWan, latents: Tensor, begin: int, end: int) -> Tensor:
    """Frames ``begin`` to ``end`` of what `decode_whole` makes, at half the cost of all of a long video.

    The stages before the last two are the ones that reach far back, and they are small. The others see the part alone,
    and the frames before it that their convolutions reach.
    """
    decoder = vae.decoder
    x = decoder.mid_block(decoder.conv_in(vae.post_quant_conv(latents)))
    *first, third, fourth = decoder.up_blocks
    for block in first:
        x = block(x)
    before = max(begin - PART_REACH, 0)
    x = fourth(third(x[:, :, before:end]))
    return decoder.conv_out(decoder.nonlinearity(decoder.norm_out(x)))[:, :, begin - before :]


def _resample_whole(self: WanResample, x: Tensor) -> Tensor:
    if self.mode == "upsample3d":
        # The first frame has no time convolution, and the others do not see it.
        later = self.time_conv(x[:, :, 1:])
        batch, channels, frames, height, width = later.shape
        later = later.view(batch, 2, channels // 2, frames, height, width).permute(0, 2, 3, 1, 4, 5)
        x = torch.cat([x[:, :, :1], later.reshape(batch, channels // 2, 2 * frames, height, width)], 2)
    batch, _, frames = x.shape[:3]
    x = self.resample(x.transpose(1, 2).flatten(0, 1)).unflatten(0, (batch, frames)).transpose(1, 2)
    if self.mode == "downsample3d":
        x = torch.cat([x[:, :, :1], self.time_conv(x)], 2)
    return x


def _convolve_in_2d(self: WanCausalConv3d, x: Tensor) -> Tensor:
    """The frames that a kernel covers become channels of a 2-D convolution.

    Four times faster on a CPU without good 3-D kernels; on an H200 a training step takes about as long as before.
    """
    across, down, before = self._padding[0], self._padding[2], self._padding[4]
    taps, stride = self.kernel_size[0], self.stride[0]
    if before:
        x = F.pad(x, (0, 0, 0, 0, before, 0))
    batch, frames = len(x), (x.shape[2] - taps) // stride + 1
    if taps > 1:
        x = torch.cat([x[:, :, tap : tap + (frames - 1) * stride + 1 : stride] for tap in range(taps)], 1)
    weight = self.weight.transpose(1, 2).flatten(1, 2)
    x = F.conv2d(x.transpose(1, 2).flatten(0, 1), weight, self.bias, padding=(down, across))
    return x.unflatten(0, (batch, frames)).transpose(1, 2)


def _fused_norm(self: WanRMS_norm, x: Tensor) -> Tensor:
    weight = self.gamma.flatten().to(x.dtype)
    return F.rms_norm(x.movedim(1, -1), weight.shape, weight, eps=1e-12).movedim(-1, 1)


class FoldedPadding:
    """An attention processor for prompts padded to ``padded`` rows, of which only the first ``rows`` are given; where
    a model reads an image too, its tokens come before them.

    The pipeline pads embeddings with zero rows and attends to them too. They are all alike, so one row whose score is
    raised by the logarithm of how many it stands for gives the same softmax at a sixteenth of the work.
    """

    def __init__(self, rows: int, padded: int = 512) -> None:
        self.rows = rows
        self.folded = math.log(padded - rows + 1)

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        image_tokens = None
        if attn.add_k_proj is not None:
            image_tokens, context = context[:, : -self.rows], context[:, -self.rows :]
        query, key = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(context))
        query, key, value = (x.unflatten(2, (attn.heads, -1)) for x in (query, key, attn.to_v(context)))
        if rotary_emb is not None:
            query, key = _rotate(query, *rotary_emb), _rotate(key, *rotary_emb)
        bias = None
        if encoder_hidden_states is not None:
            bias = torch.zeros(self.rows, dtype=value.dtype, device=value.device)
            bias = F.pad(bias[1:], (0, 1), value=self.folded).expand(len(value), 1, query.shape[1], -1)
        query, key, value = (x.to(value.dtype).transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        if image_tokens is not None:
            key, value = attn.norm_added_k(attn.add_k_proj(image_tokens)), attn.add_v_proj(image_tokens)
            key, value = (x.unflatten(2, (attn.heads, -1)).to(query.dtype).transpose(1, 2) for x in (key, value))
            out = out + F.scaled_dot_product_attention(query, key, value)
        return attn.to_out[0](out.transpose(1, 2).flatten(2, 3))


def fold_padding(transformer: WanTransformer3DModel, rows: int) -> None:
    for block in transformer.blocks:
        block.attn1.set_processor(FoldedPadding(rows))
        block.attn2.set_processor(FoldedPadding(rows))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
