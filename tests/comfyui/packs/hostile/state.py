"""What of torch and the process another node relies on, as comparable values."""

import logging
import os
import threading
import warnings

import torch
import torch.nn.functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def snapshot():
    state = {
        "dispatch modes": [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()],
        "function modes": [type(mode).__name__ for mode in _get_current_function_mode_stack()],
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "torch threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "warning filters": [str(entry) for entry in warnings.filters],
        "root logger": (logging.root.level, [type(handler).__name__ for handler in logging.root.handlers]),
        "excepthooks": (id(threading.excepthook), threading.main_thread().name),
        "environment": dict(os.environ),
    }
    for name, module in (("torch.nn.functional", F), ("torch", torch), ("torch.Tensor", torch.Tensor)):
        state[name] = {key: id(value) for key, value in vars(module).items() if callable(value)}
    return state


def differences(before, after):
    """Names that appear are no change: torch imports parts of itself when they are first used."""
    found = []
    for name, old in before.items():
        new = after[name]
        if isinstance(old, dict):
            changed = sorted(key for key in old if new.get(key) != old[key])
            if name == "environment":
                changed += sorted(set(new) - set(old))
            if changed:
                found.append(f"{name}: {', '.join(changed)}")
        elif old != new:
            found.append(f"{name} was {old}, is {new}")
    return found
