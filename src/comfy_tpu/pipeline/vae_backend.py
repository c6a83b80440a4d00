"""Which implementation runs a model's VAE: the family's functions on the torch module, or another of the family's."""

from __future__ import annotations

from comfy_tpu.config import MESH_AXES, VAE_BACKENDS, VaeBackend
from comfy_tpu.errors import InvalidValueError, UnsupportedError
from comfy_tpu.families.model_family import ModelFamily, VaeFunctions
from comfy_tpu.parallel.constraints import Axes
from comfy_tpu.pipeline.model_files import ModelFiles

_WIDTH: Axes = (None, None, None, None, MESH_AXES)
"""Frames are split by columns over the whole mesh."""


def vae_functions(backend: VaeBackend, family: ModelFamily) -> VaeFunctions:
    if backend in family.vae.other_backends:
        return family.vae.other_backends[backend]()
    return VaeFunctions(
        family.vae.decode_frame,
        {"latent": _WIDTH, "cache": _WIDTH},
        family.image.encode_frames if family.image else None,
        {"pixels": _WIDTH, "cache": _WIDTH},
    )


def check_vae_backend(backend: str, files: ModelFiles) -> None:
    """Before devices are started."""
    if backend not in VAE_BACKENDS:
        raise InvalidValueError(
            f"vae_backend={backend!r} is unknown; choose from {', '.join(VAE_BACKENDS)}", field="vae_backend"
        )
    if backend == "torchax":
        return
    vae = files.family.vae
    if backend not in vae.other_backends:
        raise UnsupportedError(
            f"vae_backend={backend}: the VAE of {files.family.name} has no such implementation; choose torchax",
            field="vae_backend",
        )
    vae.other_backends[backend]().check(files.config(vae.component))
