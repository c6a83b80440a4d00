"""Diffusion models on TPU, GPU and CPU: PyTorch modules traced once by torchax, run as plain JAX programs.

    import comfy_tpu

    pipe = comfy_tpu.open("demo")
    pipe("a red circle moving left", seed=7).save("x.mp4")

Importing this package starts nothing: neither jax nor torch is loaded until a name that needs them is used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from comfy_tpu.config import (
        FAST,
        AttentionConfig,
        CacheConfig,
        FastSettings,
        GenerationSettings,
        Lora,
        ResidencyConfig,
        RuntimeConfig,
        SingleFiles,
    )
    from comfy_tpu.errors import ComfyTpuError
    from comfy_tpu.facade import Pipeline, Video, open
    from comfy_tpu.pipeline.progress import Progress

__version__ = "0.1.0"

__all__ = [
    "FAST",
    "AttentionConfig",
    "CacheConfig",
    "ComfyTpuError",
    "FastSettings",
    "GenerationSettings",
    "Lora",
    "Pipeline",
    "Progress",
    "ResidencyConfig",
    "RuntimeConfig",
    "SingleFiles",
    "Video",
    "open",
]

_HOMES = {
    **dict.fromkeys(("Pipeline", "Video", "open"), "facade"),
    **dict.fromkeys(("Progress",), "pipeline.progress"),
    **dict.fromkeys(("ComfyTpuError",), "errors"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'config')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
