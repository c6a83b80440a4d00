"""Attention in pure JAX and Pallas, for TPU, GPU and CPU, on one device or over a mesh."""

from comfy_tpu.kernels.dispatch import attention as attention
from comfy_tpu.kernels.dispatch import joint_attention as joint_attention

__all__ = ["attention", "joint_attention"]
