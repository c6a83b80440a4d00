"""What training does faster gives what diffusers does at inference."""

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel

from tools.demo_model.shortcuts import decode_part, decode_whole, encode_whole, fold_padding, take_whole_clips


@pytest.fixture
def vae():
    torch.manual_seed(0)
    return AutoencoderKLWan(base_dim=4, z_dim=4, dim_mult=[1, 2, 2, 2], num_res_blocks=1).eval().requires_grad_(False)


@pytest.mark.parametrize("frames", [1, 5, 13])
def test_whole_clips_are_coded_as_chunks_are(vae, frames):
    video = torch.rand(2, 3, frames, 16, 32) * 2 - 1
    moments = vae.encode(video).latent_dist.parameters
    decoded = vae.decode(moments[:, :4]).sample
    take_whole_clips(vae)
    torch.testing.assert_close(encode_whole(vae, video), moments, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(decode_whole(vae, moments[:, :4]).clamp(-1, 1), decoded, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("begin", "end"), [(0, 4), (9, 12), (25, 29)])
def test_a_part_is_decoded_as_in_the_whole(vae, begin, end):
    take_whole_clips(vae)
    latents = torch.randn(2, 4, 8, 2, 4)
    whole = decode_whole(vae, latents)
    torch.testing.assert_close(decode_part(vae, latents, begin, end), whole[:, :, begin:end], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("with_image", [False, True])
def test_folded_padding_equals_512_rows(with_image):
    torch.manual_seed(0)
    transformer = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=8,
        ffn_dim=32,
        num_layers=2,
        **({"image_dim": 6, "added_kv_proj_dim": 24} if with_image else {}),
    ).requires_grad_(False)
    image_tokens = torch.randn(3, 5, 6) if with_image else None
    latents, timestep = torch.randn(3, 4, 2, 4, 4), torch.tensor([3.0, 400.0, 999.0])
    embeds = torch.zeros(3, 512, 8)
    for row, length in enumerate((1, 9, 31)):
        embeds[row, :length] = torch.randn(length, 8)
    plain = transformer(latents, timestep, embeds, image_tokens).sample
    fold_padding(transformer, rows=32)
    folded = transformer(latents, timestep, embeds[:, :32], image_tokens).sample
    torch.testing.assert_close(folded, plain, atol=1e-5, rtol=1e-4)
