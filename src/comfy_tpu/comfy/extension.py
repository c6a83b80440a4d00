"""What ComfyUI asks the pack for: its nodes, and one route for the device panel."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from comfy_tpu.comfy.compile_nodes import TPUCompileCLIP, TPUCompileModel, TPUCompileVAE, TPULoadDiffusionModel
from comfy_tpu.comfy.info_node import TPUInfo
from comfy_tpu.comfy.lora_node import TPULoraLoader
from comfy_tpu.comfy.routes import add_routes
from comfy_tpu.comfy.wan_nodes import Wan21TextEncoder, Wan21TPUPipeline, Wan21TPUSampler, Wan21TPUVAEDecoder

NODES: tuple[type[io.ComfyNode], ...] = (
    Wan21TextEncoder,
    Wan21TPUSampler,
    Wan21TPUVAEDecoder,
    Wan21TPUPipeline,
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


async def comfy_entrypoint() -> ComfyExtension:
    add_routes()
    return TPUExtension()
