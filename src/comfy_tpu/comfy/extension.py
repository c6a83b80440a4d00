"""What ComfyUI asks the pack for: its nodes, and one route for the device panel."""

from __future__ import annotations

import logging

from comfy_api.latest import ComfyExtension, io

from comfy_tpu.comfy.compile_nodes import TPUCompileCLIP, TPUCompileModel, TPUCompileVAE, TPULoadDiffusionModel
from comfy_tpu.comfy.family_nodes import make_nodes
from comfy_tpu.comfy.info_node import TPUInfo
from comfy_tpu.comfy.lora_node import TPULoraLoader
from comfy_tpu.comfy.routes import add_routes
from comfy_tpu.families.registry import family_cards
from comfy_tpu.terminal_text import SanitizeRecords

NODES: tuple[type[io.ComfyNode], ...] = (
    *(node for card in family_cards() for nodes in card.node_sets for node in make_nodes(nodes)),
    TPULoraLoader,
    TPUCompileModel,
    TPUCompileVAE,
    TPUCompileCLIP,
    TPULoadDiffusionModel,
    TPUInfo,
)


class TPUExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return list(NODES)


def sanitize_warnings() -> None:
    """ComfyUI's handler prints what our modules log; this one is asked before it."""
    logger = logging.getLogger("comfy_tpu")
    if not any(isinstance(handler, SanitizeRecords) for handler in logger.handlers):
        logger.addHandler(SanitizeRecords())


async def comfy_entrypoint() -> ComfyExtension:
    sanitize_warnings()
    add_routes()
    return TPUExtension()
