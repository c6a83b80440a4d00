"""The operators that torchax lacks or does badly, one decorated function each.

    @operator(torch.nn.functional.rms_norm)
    def rms_norm(input, normalized_shape, weight=None, eps=None): ...

A function is written on jax arrays and keeps torch's contract: names, defaults, dtypes, and an error for what it does
not support. `load_operators` imports the modules, which fills the table; the trace environment installs its entries.
"""

from comfy_tpu.bridge.operators.table import OPERATORS, Operator, load_operators, operator

__all__ = ["OPERATORS", "Operator", "load_operators", "operator"]
