"""The pack's entry point for ComfyUI: its nodes, and a route for the device panel."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from comfy_api.latest import ComfyExtension, io

from comfy_tpu.comfy.compile_nodes import TPUCompileCLIP, TPUCompileModel, TPUCompileVAE, TPULoadDiffusionModel
from comfy_tpu.comfy.family_nodes import make_nodes
from comfy_tpu.comfy.held_tpu import warn_of_held_tpu
from comfy_tpu.comfy.info_node import TPUInfo
from comfy_tpu.comfy.lora_node import TPULoraLoader
from comfy_tpu.comfy.options_node import TPUOptions
from comfy_tpu.comfy.pipeline_node import TPULoadPipeline
from comfy_tpu.comfy.routes import add_routes
from comfy_tpu.comfy.server_node import TPUServer
from comfy_tpu.families.registry import family_cards, register_family
from comfy_tpu.terminal_text import SanitizeRecords

NODES: tuple[type[io.ComfyNode], ...] = (
    *(node for card in family_cards() for nodes in card.node_sets for node in make_nodes(nodes)),
    TPULoraLoader,
    TPULoadPipeline,
    TPUOptions,
    TPUServer,
    TPUCompileModel,
    TPUCompileVAE,
    TPUCompileCLIP,
    TPULoadDiffusionModel,
    TPUInfo,
)


_OWNERS: dict[str, str] = {}
"""The extension that registered each node id: this pack and the pack of a single family may have the same nodes."""


class TPUExtension(ComfyExtension):
    """Registers the nodes that no other extension has registered."""

    def __init__(self, name: str, nodes: Sequence[type[io.ComfyNode]]) -> None:
        super().__init__()
        self.name, self.nodes = name, nodes

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [node for node in self.nodes if _OWNERS.setdefault(node.__name__, self.name) == self.name]


def sanitize_warnings() -> None:
    """Adds a handler that sanitizes our log records before ComfyUI's handler prints them."""
    logger = logging.getLogger("comfy_tpu")
    if not any(isinstance(handler, SanitizeRecords) for handler in logger.handlers):
        logger.addHandler(SanitizeRecords())


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
