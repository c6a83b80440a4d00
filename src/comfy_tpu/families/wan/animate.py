"""Wan Animate: the transformer, with poses added to the video's tokens and blocks that read the motion of a face."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from comfy_tpu.bridge import StackedLayers, constrain, scan, scan_groups, scan_layers
from comfy_tpu.compiler.stacking import LayerStack
from comfy_tpu.config import MESH_AXES
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.shared.patches import PatchEmbedding
from comfy_tpu.families.wan import image as wan_image
from comfy_tpu.families.wan import transformer
from comfy_tpu.parallel.rules import column, gather, replicate, row

_FACES = 8
"""Pictures of a face that go through the motion encoder at once: 0.3 GB of activations in bfloat16."""


def build_transformer(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers import WanAnimateTransformer3DModel

    model: Any = WanAnimateTransformer3DModel.from_config(dict(config))
    layers, every = model.config.num_layers, model.config.inject_face_latents_blocks
    if layers % every:
        raise UnsupportedError(
            f"the transformer reads faces in every block of {every}, of {layers}, expected a number that divides them; "
            "use one of the published models"
        )
    model.patch_embedding = PatchEmbedding.like(model.patch_embedding)
    model.pose_patch_embedding = PatchEmbedding.like(model.pose_patch_embedding)
    transformer.set_processors(model.blocks)
    for block in model.face_adapter:
        block.register_buffer("face_key", None)
        block.register_buffer("face_value", None)
    return model


TRANSFORMER = dataclasses.replace(
    wan_image.TRANSFORMER,
    classes=("WanAnimateTransformer3DModel",),
    build=build_transformer,
    stacks=(LayerStack("face_adapter", attends=False), LayerStack("blocks")),
    float32=(*wan_image.TRANSFORMER.float32, "motion_encoder.motion_synthesis_weight"),
    quantized=(*wan_image.TRANSFORMER.quantized, "face_adapter.*.to_q", "face_adapter.*.to_out"),
    rules=(
        *wan_image.TRANSFORMER.rules,
        column("face_adapter.*.to_[qkv].*"),
        row("face_adapter.*.to_out.weight"),
        replicate("face_adapter.*.to_out.bias"),
        replicate("face_adapter.*.norm_[qk].weight"),  # over the features of one head
        gather("pose_patch_embedding.weight"),
        replicate("pose_patch_embedding.bias"),
        replicate("motion_encoder.*"),  # 0.1 GB; the pictures are split over the mesh
        replicate("face_encoder.*"),
    ),
)


def prepare(
    module: Any,
    text: torch.Tensor,
    image: torch.Tensor,
    condition: torch.Tensor,
    pose: torch.Tensor,
    face: torch.Tensor,
    padding_count: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Keys and values of the prompt, of CLIP's tokens and of the face's motion; the channels beside the noise, and the
    pose, as they are. `face`: uint8 [batch, 3, frames, side, side]."""
    prepared = wan_image.prompt_cache(module, text, condition, image, padding_count)
    motion = _encode_faces(module, face)
    keys, values = module.face_adapter.map(lambda block: _motion_keys_and_values(block, motion))
    return prepared | {"pose": pose, "face_adapter.*.face_key": keys, "face_adapter.*.face_value": values}


PROMPT_AXES = {
    **wan_image.PROMPT_AXES,
    "pose": ("dp",),
    **dict.fromkeys(("face_adapter.*.face_key", "face_adapter.*.face_value"), (None, "dp", None, "tp")),
}


def _encode_faces(module: Any, face: torch.Tensor) -> torch.Tensor:
    """Tokens of the motion, [batch, latent frames, tokens of a frame, features]; zeros for the reference's frame."""
    batch, _, frames, *_ = face.shape
    pictures = (face.float() / 255.0 * 2.0 - 1.0).permute(0, 2, 1, 3, 4).flatten(0, 1)
    padding = -len(pictures) % _FACES
    groups = F.pad(pictures, (0, 0, 0, 0, 0, 0, 0, padding)).unflatten(0, (-1, _FACES))
    directions = orthonormal_columns(module.motion_encoder.motion_synthesis_weight.float() + 1e-8)

    def encode(carry: None, group: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, _motion_features(module.motion_encoder, constrain(group, MESH_AXES, None, None, None))

    features = scan(encode, None, groups)[1].flatten(0, 1)[: batch * frames]
    vectors = (features.float() @ directions.T).to(features.dtype)
    tokens = _face_tokens(module.face_encoder, vectors.unflatten(0, (batch, frames)))
    return F.pad(tokens, (0, 0, 0, 0, 1, 0))


def _motion_features(encoder: Any, pictures: torch.Tensor) -> torch.Tensor:
    """[pictures, motion features], as far as the sum over directions, which is the same for all."""
    hidden = encoder.conv_in(pictures.to(encoder.conv_in.weight.dtype))
    for block in encoder.res_blocks:
        hidden = block(hidden)
    hidden = encoder.conv_out(hidden).squeeze(-1).squeeze(-1)
    for layer in encoder.motion_network:
        hidden = layer(hidden)
    return hidden


def orthonormal_columns(matrix: torch.Tensor) -> torch.Tensor:
    """Q of the QR decomposition of a tall matrix, by Householder's reflections and with LAPACK's signs.

    Written out because the signs of columns are part of the trained model, and another backend's QR may choose others.
    """
    rows, columns = matrix.shape
    upper = matrix
    numbers = torch.arange(rows, device=matrix.device)
    reflections: list[torch.Tensor] = []
    for index in range(columns):
        below = torch.where(numbers >= index, upper[:, index], torch.zeros_like(upper[:, index]))
        pivot, length = upper[index, index], below.square().sum().sqrt()
        corner = torch.where(pivot < 0, length, -length)
        vector = below - torch.where(numbers == index, corner, torch.zeros_like(corner))
        vector = vector / vector.square().sum().sqrt()
        upper = upper - 2 * vector[:, None] * (vector @ upper)[None]
        reflections.append(vector)
    found = torch.eye(rows, columns, device=matrix.device)
    for vector in reversed(reflections):
        found = found - 2 * vector[:, None] * (vector @ found)[None]
    return found


def _face_tokens(encoder: Any, vectors: torch.Tensor) -> torch.Tensor:
    """[batch, frames, features] -> [batch, latent frames, tokens, features]: causal convolutions over the frames, whose
    padding repeats the first one."""

    def convolve(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.permute(0, 2, 1)
        return layer(torch.cat((hidden[:, :, :1].expand(-1, -1, layer.kernel_size[0] - 1), hidden), dim=2))

    batch = vectors.shape[0]
    hidden = convolve(encoder.conv1_local, vectors.to(encoder.conv1_local.weight.dtype))
    hidden = hidden.unflatten(1, (encoder.num_heads, -1)).flatten(0, 1).permute(0, 2, 1)
    hidden = encoder.act(encoder.norm1(hidden))
    hidden = encoder.act(encoder.norm2(convolve(encoder.conv2, hidden).permute(0, 2, 1)))
    hidden = encoder.act(encoder.norm3(convolve(encoder.conv3, hidden).permute(0, 2, 1)))
    tokens = encoder.out_proj(hidden).unflatten(0, (batch, -1)).permute(0, 2, 1, 3)
    empty = encoder.padding_tokens.expand(batch, tokens.shape[1], -1, -1).to(tokens.dtype)
    return torch.cat((tokens, empty), dim=2)


def _motion_keys_and_values(block: Any, motion: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[batch, frames × tokens, heads, head_dim] each."""
    motion = block.pre_norm_kv(motion.to(block.to_k.weight.dtype)).flatten(1, 2)
    key = block.norm_k(block.to_k(motion).unflatten(2, (block.heads, -1)))
    return key, block.to_v(motion).unflatten(2, (block.heads, -1))


def predict(
    module: Any,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    guidance_scale: torch.Tensor,
    condition: torch.Tensor,
    pose: torch.Tensor,
) -> torch.Tensor:
    """The velocity. The first latent frame is that of the reference image, and has neither pose nor face."""
    step = transformer.begin_step(module, torch.cat((latents, condition.to(latents.dtype)), dim=1), timestep)
    frames, rows, columns = step.grid[1:]
    number = torch.arange(math.prod(step.grid[1:]), device=latents.device) // (rows * columns)
    padded = F.pad(pose.to(step.hidden.dtype), (0, 0, 0, 0, 1, 0))
    poses = module.pose_patch_embedding(padded).flatten(2).transpose(1, 2)
    hidden = step.hidden + poses * (number > 0).to(poses.dtype)[None, :, None]
    tokens = module.face_adapter.face_key.shape[2] // frames
    keys = torch.arange(frames * tokens, device=latents.device) // tokens
    same_frame = (number[:, None] == keys[None])[None, None]

    def run_block(block: Any, hidden: torch.Tensor, part: None) -> tuple[torch.Tensor, None]:
        return block(hidden, step.text, step.modulation, step.rotary), None

    def run_group(block: Any, members: StackedLayers, hidden: torch.Tensor, part: None) -> torch.Tensor:
        hidden, _ = scan_layers(members.part(0, 1), run_block, hidden)
        hidden = hidden + _read_face(block, hidden, same_frame)
        if members.count == 1:
            return hidden
        return scan_layers(members.part(1, members.count), run_block, hidden)[0]

    hidden = scan_groups(module.face_adapter.layers, module.blocks.layers, run_group, hidden)
    return transformer.end_step(module, hidden, step)


def _read_face(block: Any, hidden: torch.Tensor, same_frame: torch.Tensor) -> torch.Tensor:
    """Attention of each frame's tokens to those of its face. One call with a mask, not one for each frame: sp splits
    the tokens at places that are no borders of frames."""
    query = block.norm_q(block.to_q(block.pre_norm_q(hidden)).unflatten(2, (block.heads, -1)))
    query, key, value = (x.transpose(1, 2) for x in (query, block.face_key, block.face_value))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=same_frame)
    return block.to_out(out.transpose(1, 2).flatten(2, 3).type_as(hidden))
