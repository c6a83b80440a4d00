"""ComfyUI's own models on one device, by ComfyUI's forward and through TPU Compile Model: seconds of a sampling step.

    COMFYUI_PATH=ComfyUI python -m benchmarks.native sdxl sd3.5-large qwen-image --json benchmarks/native/h200.json

Random weights, bfloat16 on a GPU, 1024 × 1024, ComfyUI's euler with guidance (both prompts in one forward). Both run in
turns in one process, a process for each model; a step is the time of a whole sampling over its number of steps. With
the norm of the difference of both latents over the norm. `--small`: small models of the same classes, for trying it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

_NAMES = ("sdxl", "sd3.5-large", "qwen-image")


def start_comfyui(*, on_cpu: bool) -> None:
    """Makes ComfyUI's packages importable, as its main.py does."""
    sys.path.insert(0, os.environ["COMFYUI_PATH"])
    importlib.import_module("utils")  # before comfy/ itself gets on the path, which has a utils.py
    importlib.import_module("comfy.options").enable_args_parsing(False)
    importlib.import_module("comfy.cli_args").args.cpu = on_cpu
    importlib.import_module("comfy.utils").set_progress_bar_enabled(False)
    loop = types.SimpleNamespace(call_soon_threadsafe=lambda *call: None, call_later=lambda *call: None)
    quiet = types.SimpleNamespace(send_sync=lambda *message: None, loop=loop, client_id=None, last_node_id=None)
    server: Any = types.ModuleType("server")  # nobody asks this one anything
    server.PromptServer = types.SimpleNamespace(instance=quiet)
    sys.modules["server"] = server


def measure(name: str, *, is_small: bool, steps: int, repeats: int) -> dict[str, Any]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch has half of the models
    import jax
    import torch

    on_cpu = not torch.cuda.is_available()
    start_comfyui(on_cpu=on_cpu)
    import comfy.sample

    from benchmarks.native.models import find_model
    from comfy_tpu.bench.machine import describe_machine
    from comfy_tpu.comfy.compile_nodes import TPUCompileModel

    model = find_model(name, is_small=is_small)
    device, dtype = (torch.device("cpu"), torch.float32) if on_cpu else (torch.device("cuda"), torch.bfloat16)
    plain = model.build(device, dtype)
    compiled = TPUCompileModel.execute(
        plain, mesh="single", precision=str(dtype).removeprefix("torch."), attention="auto"
    ).args[0]
    noise = torch.randn(1, *model.latent, generator=torch.Generator().manual_seed(1))
    positive, negative = model.prompt(2), model.prompt(3)

    def sample(patcher: Any) -> torch.Tensor:
        latent = torch.zeros_like(noise)
        result: torch.Tensor = comfy.sample.sample(
            patcher, noise, steps, 4.0, "euler", "simple", positive, negative, latent, seed=1, disable_pbar=True
        )
        return result.cpu()

    peers: dict[str, Callable[[], torch.Tensor]] = {"ours": lambda: sample(compiled), "comfyui": lambda: sample(plain)}
    first, outputs, samples = {}, {}, {peer: list[float]() for peer in peers}
    with torch.inference_mode():
        for peer, call in peers.items():
            first[peer], outputs[peer] = _timed(call)
        for _ in range(repeats):
            for peer, call in peers.items():
                samples[peer].append(_timed(call)[0] / steps)
    difference = (outputs["ours"] - outputs["comfyui"]).norm() / outputs["comfyui"].norm()
    medians = {peer: statistics.median(found) for peer, found in samples.items()}
    return {
        "model": model.title,
        "is_small": is_small,
        "steps": steps,
        **describe_machine(),
        "first_s": first,
        "step_s": samples,
        "median_step_s": medians,
        "times_faster": medians["comfyui"] / medians["ours"],
        "difference": float(difference),
        "backend": jax.default_backend(),
    }


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=_NAMES)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    if len(arguments.models) == 1:
        options = {"is_small": arguments.small, "steps": arguments.steps, "repeats": arguments.repeats}
        result = measure(arguments.models[0], **options)
        known = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
        arguments.json.write_text(json.dumps({**known, arguments.models[0]: result}, indent=1) + "\n")
        found = result["median_step_s"]
        print(f"{result['model']}: {found['ours']:.4f} s a step, ComfyUI {found['comfyui']:.4f} s, ", end="")
        print(f"{result['times_faster']:.2f} × as fast, difference {result['difference']:.1e}", flush=True)
        return
    rest = [word for word in sys.argv[1:] if word not in _NAMES]
    for name in arguments.models:
        subprocess.run([sys.executable, "-m", "benchmarks.native", name, *rest], check=True)


if __name__ == "__main__":
    main()
