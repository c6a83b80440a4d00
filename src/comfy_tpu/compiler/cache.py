"""Where compiled programs are kept between processes."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from comfy_tpu.config import CacheConfig


def cache_directory(config: CacheConfig) -> Path:
    """The directory itself need not exist yet."""
    if config.directory is not None:
        return config.directory
    if from_environment := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return Path(from_environment)
    return platformdirs.user_cache_path("comfy-tpu") / "xla"
