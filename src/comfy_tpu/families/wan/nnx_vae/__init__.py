"""The Wan 2.1 VAE as a Flax NNX model: channels last, without torch in its programs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from comfy_tpu.distribution import install_command
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.model_family import VaeFunctions
from comfy_tpu.parallel.placement import Placement

if TYPE_CHECKING:
    from comfy_tpu.families.wan.nnx_vae.component import NnxComponent


def vae_component(config: Mapping[str, Any], placement: Placement, **options: Any) -> NnxComponent:
    """The VAE of this configuration on a placement. Imports flax, which is an optional dependency."""
    with _flax_import_errors():
        from comfy_tpu.families.wan.nnx_vae.component import NnxComponent
    return NnxComponent(config, placement, **options)


def check_vae(config: Mapping[str, Any]) -> None:
    """Raises UnsupportedError if a VAE of this configuration cannot run here."""
    with _flax_import_errors():
        from comfy_tpu.families.wan.nnx_vae.vae import read_architecture
    read_architecture(config)


def nnx_functions() -> VaeFunctions:
    with _flax_import_errors():
        from comfy_tpu.families.wan.nnx_vae import decoding
    return VaeFunctions(
        decoding.decode_frame,
        decoding.DECODE_FRAME_AXES,
        decoding.encode_frames,
        decoding.ENCODE_FRAMES_AXES,
        make_component=vae_component,
        check=check_vae,
    )


@contextlib.contextmanager
def _flax_import_errors() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "flax":
            raise
        raise UnsupportedError(
            f"the Flax NNX VAE needs flax, which is not installed; run `{install_command('nnx')}`"
        ) from error
