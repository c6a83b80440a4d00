"""The warning of a server that starts while another process holds the TPU. Needs no ComfyUI, and starts no device."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from comfy_tpu.parallel.tpu_holders import ROOT, find_holders, find_tpu

logger = logging.getLogger(__name__)


def warn_of_held_tpu(root: Path = ROOT) -> None:
    """Logs who holds it: the first node of ours that runs would fail."""
    requested = os.environ.get("JAX_PLATFORMS")
    if requested and "tpu" not in requested.split(","):
        return
    place, holders = find_tpu(root), find_holders(root)
    if place is not None and holders:
        logger.warning(
            "the TPU (%s) is held by %s: the TPU nodes of this server cannot run before that ends (kill %s)",
            place,
            " and ".join(map(str, holders)),
            " ".join(str(holder.pid) for holder in holders),
        )
