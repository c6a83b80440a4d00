"""Wan 2.1 14B at 720p, without weights, memory or a TPU: traced and lowered for eight chips, splash inside."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROCESS = """
import json, resource, sys, time
import jax, numpy as np, torch
from comfy_tpu.compiler.component import Component
from comfy_tpu.config import MeshSizes
from comfy_tpu.families import wan
from comfy_tpu.parallel.mesh import abstract_placement

begin = time.process_time()
config = dict(
    patch_size=(1, 2, 2), num_attention_heads=40, attention_head_dim=128, in_channels=16, out_channels=16,
    text_dim=4096, freq_dim=256, ffn_dim=13824, num_layers=40, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
    rope_max_seq_len=1024,
)
placement = abstract_placement(MeshSizes(dp=2, sp=4), platform="tpu", chip="v6e")
component = Component(wan.TRANSFORMER, config, placement, dtype=torch.bfloat16)
bf16 = np.dtype("bfloat16")
exported = component.program(static=("return_dict",), input_axes={"hidden_states": ("dp",)}).export(
    "tpu",
    component.abstract_weights(),
    hidden_states=jax.ShapeDtypeStruct((2, 16, 21, 90, 160), bf16),
    timestep=jax.ShapeDtypeStruct((2,), np.int32),
    encoder_hidden_states=jax.ShapeDtypeStruct((2, 512, 4096), bf16),
    return_dict=False,
)
seconds = time.process_time() - begin
text = exported.mlir_module()
report = component.plan.report().as_dict()
print(json.dumps({
    "seconds": seconds,
    "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "kernels": text.count("tpu_custom_call"),
    "loops": text.count("stablehlo.while"),
    "square": "75600x75600" in text,
    "all to all": text.count("stablehlo.all_to_all"),
    "outputs": [list(aval.shape) for aval in exported.out_avals],
    "devices": exported.nr_devices,
    "platforms": list(exported.platforms),
    "megabytes": len(exported.mlir_module_serialized) / 1e6,
    "report": report,
}))
"""


def test_wan_14b_at_720p_lowers_for_tpu() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROCESS],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": "src"},
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["platforms"] == ["tpu"]
    assert seen["devices"] == 8
    assert seen["outputs"] == [[2, 16, 21, 90, 160]]
    assert seen["kernels"] == 2, "self-attention and cross-attention, once each: forty blocks are one scanned block"
    assert seen["loops"] == 1
    assert seen["all to all"] == 4
    assert not seen["square"]
    assert seen["megabytes"] < 5, "no table of 75,600 rows was worked out on the host"
    assert seen["peak"] < 4e9
    # The specification's limit, in processor time, which other work on the machine does not change: measured 3 s.
    assert seen["seconds"] < 30
