"""torchax, and the boundary around it. Nothing else imports torchax."""

from comfy_tpu.bridge.boundary import alias_torch_tensor, check_host_data, is_on_one_gpu, to_device, to_host
from comfy_tpu.bridge.calls import call_function, call_module
from comfy_tpu.bridge.constraints import constrain
from comfy_tpu.bridge.handover import GpuHandover
from comfy_tpu.bridge.joint import joint_attention, video_attention
from comfy_tpu.bridge.layers import (
    BlockCall,
    StackedLayers,
    fold_layers,
    map_layers,
    run_layer,
    run_layers,
    scan_groups,
    scan_layers,
    tensor_content,
)
from comfy_tpu.bridge.loops import scan
from comfy_tpu.bridge.module_parts import named_parts, named_tensors
from comfy_tpu.bridge.operators import operator
from comfy_tpu.bridge.rotary import rotary_attention, rotate_pairs
from comfy_tpu.bridge.rounding import round_to
from comfy_tpu.bridge.scope import TraceContext, current_trace, token_grid_scope, trace_scope
from comfy_tpu.bridge.skeleton import build_skeleton, skeleton_limits, weight_shapes

__all__ = [
    "BlockCall",
    "GpuHandover",
    "StackedLayers",
    "TraceContext",
    "alias_torch_tensor",
    "build_skeleton",
    "call_function",
    "call_module",
    "check_host_data",
    "constrain",
    "current_trace",
    "fold_layers",
    "is_on_one_gpu",
    "joint_attention",
    "map_layers",
    "named_parts",
    "named_tensors",
    "operator",
    "rotary_attention",
    "rotate_pairs",
    "round_to",
    "run_layer",
    "run_layers",
    "scan",
    "scan_groups",
    "scan_layers",
    "skeleton_limits",
    "tensor_content",
    "to_device",
    "to_host",
    "token_grid_scope",
    "trace_scope",
    "video_attention",
    "weight_shapes",
]
