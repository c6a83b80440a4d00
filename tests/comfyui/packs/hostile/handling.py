"""Rough hands: `.to()`, `.cpu()`, `.half()`, arithmetic, copies and pickles of everything within reach."""

import copy
import gc
import io

import torch


def handle_everything(value, path="value"):
    """Walks dicts, lists, tuples and attributes. Problems, with the way to the thing."""
    if isinstance(value, torch.Tensor):
        return handle_tensor(value, path)
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, (list, tuple)):
        parts = enumerate(value)
    elif hasattr(value, "__dict__"):
        parts = vars(value).items()
    else:
        return []
    problems = attempt(f"deepcopy of {path}", lambda: copy.deepcopy(value))
    for name, part in parts:
        problems += handle_everything(part, f"{path}.{name}")
    return problems


def handle_tensor(tensor, path):
    problems = []
    if type(tensor) is not torch.Tensor:
        problems.append(f"{path} is a {type(tensor).__module__}.{type(tensor).__name__}, not a plain tensor")
    if tensor.device.type != "cpu":
        problems.append(f"{path} is on {tensor.device}")
    for name, action in {
        "to": lambda: tensor.to("cpu"),
        "to dtype": lambda: tensor.to(torch.float64),
        "cpu": lambda: tensor.cpu(),
        "half": lambda: tensor.half(),
        "addition": lambda: tensor + tensor,
        "in place": lambda: tensor.clone().mul_(2),
        "numpy": lambda: tensor.float().numpy(),
        "deepcopy": lambda: copy.deepcopy(tensor),
        "save": lambda: torch.save(tensor, io.BytesIO()),
    }.items():
        problems += attempt(f"{name} of {path}", action)
    return problems


def handle_loaded_models(loaded):
    """What ComfyUI's own model management does, on every model that it knows."""
    problems = []
    for number, entry in enumerate(loaded):
        model = entry.model
        if model is None:
            continue
        problems += attempt(f"to of loaded model {number}", lambda model=model: model.model.to("cpu"))
        problems += attempt(f"memory of loaded model {number}", lambda model=model: model.model_size())
    return problems


def handle_tensors_of_the_process():
    """Also those that no workflow hands out: model management of other packs finds tensors in such ways."""
    problems = []
    # By type, not isinstance: asking a lazy module for its class would import it.
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    for tensor in tensors:
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "meta":
            continue  # a shape without data; torch itself refuses to move it
        problems += attempt(f"to of a {type(tensor).__module__}.{type(tensor).__name__}", lambda t=tensor: t.to("cpu"))
        problems += attempt(
            f"maths with a {type(tensor).__module__}", lambda t=tensor: t.flatten()[:1] + t.flatten()[:1]
        )
    return problems


def attempt(what, action):
    try:
        action()
    except Exception as error:  # noqa: BLE001 - whatever it is, it would have reached the user
        return [f"{what}: {type(error).__name__}: {error}"]
    return []
