"""What ComfyUI asks the pack for: its nodes, and one route for the device panel."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from comfy_api.latest import ComfyExtension, io

from comfy_tpu.comfy.compile_nodes import TPUCompileCLIP, TPUCompileModel, TPUCompileVAE, TPULoadDiffusionModel
from comfy_tpu.comfy.family_nodes import make_nodes
from comfy_tpu.comfy.info_node import TPUInfo
from comfy_tpu.comfy.lora_node import TPULoraLoader
from comfy_tpu.comfy.routes import add_routes
from comfy_tpu.families.registry import family_cards, register_family
from comfy_tpu.parallel.tpu_holders import ROOT, find_holders, find_tpu
from comfy_tpu.terminal_text import SanitizeRecords

logger = logging.getLogger(__name__)

NODES: tuple[type[io.ComfyNode], ...] = (
    *(node for card in family_cards() for nodes in card.node_sets for node in make_nodes(nodes)),
    TPULoraLoader,
    TPUCompileModel,
    TPUCompileVAE,
    TPUCompileCLIP,
    TPULoadDiffusionModel,
    TPUInfo,
)


_OWNERS: dict[str, str] = {}
"""The extension that gave ComfyUI a node, by the node's id: ours and a family's own pack both know that family."""


class TPUExtension(ComfyExtension):
    """Nodes that no other extension has given to ComfyUI before."""

    def __init__(self, name: str, nodes: Sequence[type[io.ComfyNode]]) -> None:
        super().__init__()
        self.name, self.nodes = name, nodes

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [node for node in self.nodes if _OWNERS.setdefault(node.__name__, self.name) == self.name]


def sanitize_warnings() -> None:
    """ComfyUI's handler prints what our modules log; this one is asked before it."""
    logger = logging.getLogger("comfy_tpu")
    if not any(isinstance(handler, SanitizeRecords) for handler in logger.handlers):
        logger.addHandler(SanitizeRecords())


def warn_of_held_tpu(root: Path = ROOT) -> None:
    """When the server starts: the first node that runs would fail. Starts no device."""
    requested = os.environ.get("JAX_PLATFORMS")
    if (requested and "tpu" not in requested.split(",")) or not (place := find_tpu(root)):
        return
    if holders := find_holders(root):
        logger.warning(
            "the TPU (%s) is held by %s: the TPU nodes of this server cannot run before that ends (kill %s)",
            place,
            " and ".join(map(str, holders)),
            " ".join(str(holder.pid) for holder in holders),
        )


async def comfy_entrypoint() -> ComfyExtension:
    sanitize_warnings()
    warn_of_held_tpu()
    add_routes()
    return TPUExtension("comfy-tpu", NODES)


def family_entrypoint(package: str) -> Callable[[], Awaitable[ComfyExtension]]:
    """`comfy_entrypoint` of a pack with one family, which is registered here if pip has not installed it."""

    async def comfy_entrypoint() -> ComfyExtension:
        sanitize_warnings()
        card = register_family(package)
        return TPUExtension(package, [node for nodes in card.node_sets for node in make_nodes(nodes)])

    return comfy_entrypoint
