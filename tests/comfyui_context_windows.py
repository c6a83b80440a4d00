"""ComfyUI's own module of context windows, without the rest of ComfyUI."""

import functools
import importlib.util
import sys
import types
from typing import Any

import pytest

from tests.comfyui.checkout import NoComfyUIError, find_path


@functools.cache
def load() -> Any:
    """The module `comfy.context_windows`; skips the test where there is no ComfyUI.

    It uses three imported functions: one looks for a cancelled run, one for callbacks of other nodes, and one splits
    latents into video and sound, which these tests do not have.
    """
    try:
        path = find_path() / "comfy" / "context_windows.py"
    except NoComfyUIError as error:
        pytest.skip(str(error))
    if not path.is_file():
        pytest.skip(f"{path} is missing: this ComfyUI is older than context windows")
    package = types.ModuleType("comfy")
    functions = {
        "model_management": {"throw_exception_if_processing_interrupted": lambda: None},
        "patcher_extension": {"get_all_callbacks": lambda *_: []},
        "utils": {"unpack_latents": lambda latents, _shapes: [latents]},
        "conds": {},
    }
    stubs = {"comfy": package}
    for module_name, contents in functions.items():
        stub = types.ModuleType(f"comfy.{module_name}")
        stub.__dict__.update(contents)
        package.__dict__[module_name] = stubs[stub.__name__] = stub
    name = "comfyui_context_windows"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for each, stub in {**stubs, name: module}.items():  # its dataclasses look their module up
            patch.setitem(sys.modules, each, stub)
        spec.loader.exec_module(module)
    return module


def handler(schedule: str, weights: str, length: int, overlap: int, stride: int = 1, step: int = 0) -> Any:
    """ComfyUI's handler of windows along dimension 2, by the names of our settings."""
    module = load()
    schedules = {"static": "standard_static", "uniform": "standard_uniform", "looped": "looped_uniform"}
    made = module.IndexListContextHandler(
        module.get_matching_context_schedule(schedules[schedule]),
        module.get_matching_fuse_method(weights),
        context_length=length,
        context_overlap=overlap,
        context_stride=stride,
        closed_loop=True,
        dim=2,
    )
    made._step = step
    made.causal_window_fix = False  # ComfyUI 0.33 by default prepends a frame to every window but the first
    return made
