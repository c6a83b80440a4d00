"""Importing any module of the package changes nothing elsewhere: no patches, handlers, filters, defaults, variables."""

import json
import subprocess
import sys

# What a module could change of others while it is imported. Modules that need ComfyUI are left out: it is not here.
SCRIPT = """
import importlib, json, logging, os, pkgutil, sys, warnings
import jax, numpy, torch
from comfy_tpu.bridge.compat import load_torchax

torchax = load_torchax()
import comfy_tpu, comfy_tpu.quiet, diffusers, transformers

def state():
    return {
        "environment": dict(os.environ),
        "warning filters": [str(each) for each in warnings.filters],
        "showwarning": str(warnings.showwarning),
        "torch tensors": {name: id(value) for name, value in vars(torch.Tensor).items()},
        "torchax tensors": {name: id(value) for name, value in vars(torchax.tensor.Tensor).items()},
        "default dtype": str(torch.get_default_dtype()),
        "gradients": torch.is_grad_enabled(),
        "jax options": {name: str(value) for name, value in jax.config.values.items()},
        "handlers": [str(each) for each in logging.getLogger().handlers],
        "our handlers": [str(each) for each in logging.getLogger("comfy_tpu").handlers],
        "handled warnings": sorted(comfy_tpu.quiet._handlers),
        "excepthook": str(sys.excepthook),
        "devices started": bool(jax._src.xla_bridge._backends),
    }

names = [
    module.name
    for module in pkgutil.walk_packages(comfy_tpu.__path__, "comfy_tpu.")
    if not module.name.startswith("comfy_tpu.comfy.") and not module.name.endswith("__main__")
]
before = state()
changes = {}
# In groups: a state takes as long as the import of some modules.
for start in range(0, len(names), 20):
    for name in names[start : start + 20]:
        importlib.import_module(name)
    after = state()
    changed = [name for name in after if after[name] != before[name]]
    if changed:
        changes[", ".join(names[start : start + 20])] = changed
    before = after
print(json.dumps(changes))
"""


def test_importing_changes_nothing_elsewhere() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}
