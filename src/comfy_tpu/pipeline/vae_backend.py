"""Chooses the implementation of a model's VAE: the torch module, or another backend of the family."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from comfy_tpu.config import MESH_AXES, VAE_BACKENDS, VaeBackend
from comfy_tpu.errors import InvalidValueError, UnsupportedError
from comfy_tpu.families.card import Config
from comfy_tpu.families.model_family import ModelFamily, VaeFunctions
from comfy_tpu.parallel.constraints import Axes
from comfy_tpu.parallel.placement import Placement

COLUMN_AXES: Axes = (None, None, None, None, MESH_AXES)
"""The axes of frames: columns over the whole mesh."""


def vae_functions(backend: VaeBackend, family: ModelFamily) -> VaeFunctions:
    if backend in family.vae.other_backends:
        return family.vae.other_backends[backend]()
    return VaeFunctions(
        family.vae.decode_frame,
        {"latent": COLUMN_AXES, "cache": COLUMN_AXES},
        family.vae.encode_frames,
        {"pixels": COLUMN_AXES, "cache": COLUMN_AXES},
    )


def split_columns(axes: Mapping[str, Axes], columns: int, placement: Placement) -> Mapping[str, Axes]:
    """The axes for a video of this many latent columns; not split if a device would get less than one column.

    XLA's partitioned convolutions (jax 0.10.2) are wrong there: LTX-Video's encoder over eight CPU devices is off by
    0.25 to 0.43 at 2 and 4 columns, and by 7e-7 at 8 and 9.
    """
    return axes if columns >= placement.sizes.device_count else {}


def check_vae_backend(
    backend: str, family: ModelFamily, config: Callable[[], Config], *, takes_tiny: bool = False
) -> None:
    """Raises an error for a backend that the model does not have; runs before devices are started. `config`: the VAE's
    configuration. `takes_tiny`: "tiny" is checked elsewhere, by its file."""
    if backend not in VAE_BACKENDS:
        raise InvalidValueError(
            f"vae_backend={backend!r} is unknown; choose from {', '.join(VAE_BACKENDS)}", field="vae_backend"
        )
    if backend == "torchax" or (backend == "tiny" and takes_tiny):
        return
    vae = family.vae
    if backend not in vae.other_backends:
        raise UnsupportedError(
            f"vae_backend={backend}: the VAE of {family.name} has no such implementation; choose torchax",
            field="vae_backend",
        )
    vae.other_backends[backend]().check(config())
