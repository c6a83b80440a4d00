"""torchax imports on torch versions it does not know, and torch is the same afterwards."""

import json
import subprocess
import sys

import pytest
import torch

from comfy_tpu.bridge import compat

OBSERVE = """
import json, os, sys, warnings
import pytest
import torch
import torch.distributed._functional_collectives
def state():
    return {
        "accelerator": str(torch.accelerator.current_accelerator()),
        "available": torch.accelerator.is_available(),
        "backend": torch._C._get_privateuse1_backend_name(),
        "fastpath": torch.backends.mha.get_fastpath_enabled(),
        "environment": sorted(os.environ),
        "filters": [str(f) for f in warnings.filters],
        "decompositions": sum(map(len, torch._decomp.global_decomposition_table.values())),
        "lookup": [str(torch._ops.OpOverloadPacket.__getattr__), str(torch._ops._OpNamespace.__getattr__)],
        "functional": {k: id(v) for k, v in vars(torch.nn.functional).items()},
        "device modules": [hasattr(torch, "jax"), hasattr(torch, "xla")],
        "modes": [len(torch.overrides._get_current_function_mode_stack()), torch._C._len_torch_dispatch_stack()],
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "seed": torch.initial_seed(),
    }
import jax
torch.manual_seed(7)
before = state()
from comfy_tpu.bridge import compat
import comfy_tpu.bridge
after = state()
def is_present(name):
    _, packet, *overload = name.split(".")
    return hasattr(getattr(torch.ops.aten, packet, None), overload[0]) if overload else hasattr(torch.ops.aten, packet)
present = [name for name in compat.substituted_names if is_present(name)]
print(json.dumps({"before": before, "after": after, "present": present, "torchax": "torchax" in sys.modules}))
"""


def test_importing_torchax_leaves_torch_as_it_was() -> None:
    out = subprocess.run([sys.executable, "-c", OBSERVE], capture_output=True, text=True, check=True).stdout
    seen = json.loads(out.splitlines()[-1])
    assert seen["torchax"]
    assert seen["after"] == seen["before"]
    assert seen["present"] == [], "the stand-in answered for operators that this torch has"


def test_missing_names_are_substituted_for_torchax_only() -> None:
    found: list[str] = []
    with compat._substitute_missing_names(found):
        assert not hasattr(torch.ops.aten, "no_such_operator")
        assert not hasattr(torch.ops.aten.add, "no_such_overload")
        asked_by_torchax = eval(
            "torch.ops.aten.add.no_such_overload", {"torch": torch, "__name__": "torchax.ops.jaten"}
        )
        assert isinstance(asked_by_torchax, compat.MissingName)
        kept = eval("torch.ops.aten.add.Tensor", {"torch": torch, "__name__": "torchax.ops.jaten"})
        assert kept is torch.ops.aten.add.Tensor
        assert not eval("hasattr(torch.ops.xla, 'x')", {"torch": torch, "__name__": "torchax.ops.jlibrary"})
    assert found == ["aten.add.no_such_overload"]
    assert not hasattr(torch.ops.aten.add, "no_such_overload")


@pytest.mark.thorough  # by default: a good import
def test_somebody_elses_failed_import_does_no_harm() -> None:
    spoil = "import sys, types\nsys.modules['torchax.tensor'] = types.ModuleType('torchax.tensor')\n"
    check = "import comfy_tpu.bridge, torchax; assert torchax.tensor.Environment"
    subprocess.run([sys.executable, "-c", spoil + check], check=True, capture_output=True)


def test_no_missing_name_stays_in_torchax_tables() -> None:
    torchax = compat.load_torchax()
    for table in (
        torchax.ops.ops_registry.all_aten_ops,
        torchax.ops.ops_registry.all_torch_functions,
        torchax.decompositions.DECOMPOSITIONS,
        torchax.amp.autocast_policy,
    ):
        assert len(table) > 10
        assert not [key for key in table if isinstance(key, compat.MissingName)]
