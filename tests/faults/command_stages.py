"""Stages of the command on a small random model, in one process: most keep the opened pipeline, so that a run takes
tenths of a second. `loading` and `opening` are those that do not."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from comfy_tpu.cli import session
from comfy_tpu.cli.main import main
from comfy_tpu.pipeline.video import VideoPipeline
from tests.faults.examination import Stage
from tests.pipeline import small_loras, small_pipeline

PROMPT = "a red circle moving left"
SMALL = ["--height", "32", "--width", "32", "--num-frames", "5", "--steps", "2", "--seed", "3", "--mesh", "single"]
FILES = ("create", "open", "read", "map", "write", "rename", "fsync", "kill")
MEMORY = ("allocation", "transfer")

_open = VideoPipeline.open
_opened: dict[str, VideoPipeline] = {}


def _open_once(model: Any, runtime: Any, **options: Any) -> VideoPipeline:
    key = repr((model, runtime, options.get("loras"), options.get("preset")))
    if key not in _opened:
        _opened[key] = _open(model, runtime, **options)
    pipeline = _opened[key]
    pipeline.on_progress = options["on_progress"]
    return pipeline


def run(*argv: str, keeps_open: bool = True) -> tuple[int, str]:
    err = io.StringIO()
    session.video.VideoPipeline.open = _open_once if keeps_open else _open  # type: ignore[method-assign]
    try:
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
            return main(argv), err.getvalue()
    finally:
        session.video.VideoPipeline.open = _open  # type: ignore[method-assign]


@functools.cache
def model_directory() -> Path:
    """With a name of its own: what is read below it is counted only in the stages that watch it."""
    return small_pipeline.directory()


def generate(output: Path, *more: str) -> list[str]:
    return ["generate", PROMPT, "--model", str(model_directory()), *SMALL, "-o", str(output), *more]


def _unload() -> None:
    for pipeline in _opened.values():
        pipeline.running.unload()


def _forget_programs() -> None:
    for pipeline in _opened.values():
        pipeline.running.forget_programs()


def _generate(work: Path, watch: Callable[[Path], None]) -> tuple[Stage, Iterable[str]]:
    words = generate(work / "x.mp4", "--contact-sheet", str(work / "sheet.png"), "--checkpoint-every", "1")
    kept = ("x.mp4.checkpoint.safetensors",)
    return Stage("generate", functools.partial(run, *words), kept=kept), (*FILES, *MEMORY)


def _encode(work: Path, watch: Callable[[Path], None]) -> tuple[Stage, Iterable[str]]:
    output = work / "text.safetensors"
    words = ["encode", PROMPT, "--model", str(model_directory()), *SMALL, "-o", str(output)]
    return Stage("encode", functools.partial(run, *words)), (*FILES, *MEMORY)


def _denoise(work: Path, watch: Callable[[Path], None]) -> tuple[Stage, Iterable[str]]:
    run("encode", PROMPT, "--model", str(model_directory()), *SMALL, "-o", str(work / "text.safetensors"))
    words = ["denoise", str(work / "text.safetensors"), "--mesh", "single", "--checkpoint-every", "1", "--force"]
    kept = ("latents.safetensors.checkpoint.safetensors",)
    return Stage("denoise", functools.partial(run, *words), kept=kept), (*FILES, *MEMORY)


def _decode(work: Path, watch: Callable[[Path], None]) -> tuple[Stage, Iterable[str]]:
    run("encode", PROMPT, "--model", str(model_directory()), *SMALL, "-o", str(work / "text.safetensors"))
    run("denoise", str(work / "text.safetensors"), "--mesh", "single")
    words = ["decode", str(work / "latents.safetensors"), "--mesh", "single", "-o", f"{work}/frames/", "--force"]
    return Stage("decode", functools.partial(run, *words)), (*FILES, *MEMORY)


def _lora(work: Path) -> str:
    path = work.parent / "style.safetensors"
    small_loras.write(path, small_loras.diffusers_style())
    return str(path)


def _loading(work: Path, watch: Callable[[Path], None]) -> tuple[Stage, Iterable[str]]:
    """Weights are read, merged with a LoRA and put on the device in every run."""
    words = generate(work / "x.npy", "--lora", _lora(work))
    run(*words)
    watch(model_directory())
    watch(work.parent)
    return Stage("loading", functools.partial(run, *words), prepare=_unload), ("open", "read", "map", *MEMORY)


def _opening(work: Path, watch: Callable[[Path], None]) -> tuple[Stage, Iterable[str]]:
    """The model is found, described and opened in every run, and the LoRA, too."""
    words = generate(work / "x.npy", "--lora", _lora(work))
    watch(model_directory())
    watch(work.parent)
    return Stage("opening", functools.partial(run, *words, keeps_open=False)), ("open", "read", "map")


def _compiling(work: Path, watch: Callable[[Path], None]) -> tuple[Stage, Iterable[str]]:
    words = generate(work / "x.npy")
    return Stage("compiling", functools.partial(run, *words), prepare=_forget_programs), ("compile",)


def _cache(work: Path, watch: Callable[[Path], None], *, is_filled: bool = False) -> tuple[Stage, Iterable[str]]:
    """A small program is compiled and stored, or found: what fails there is never the run's failure."""
    import os

    import jax
    import numpy as np
    import torch
    from jax._src import compilation_cache

    from comfy_tpu.compiler.checkpoint import Checkpoint
    from comfy_tpu.compiler.component import Component
    from comfy_tpu.compiler.stored import open_store
    from comfy_tpu.config import CacheConfig
    from comfy_tpu.parallel.mesh import make_placement
    from tests.faults.writing_stages import as_command
    from tests.parity import small_models

    os.environ["COMFY_TPU_PROGRAM_STORE"] = "1"
    cache, model = CacheConfig(directory=work / "cache"), small_models.transformer()

    def compute() -> None:
        jax.clear_caches()
        compilation_cache.reset_cache()
        options: Any = {"dtype": torch.float32, "cache": cache, "store": open_store(cache)}
        component = Component(model.spec, model.config, make_placement("single"), **options)
        weights = component.load(Checkpoint.open(model.checkpoint))
        assert np.asarray(component.program(double)(weights, x=torch.arange(3.0))).tolist() == [0.0, 2.0, 4.0]

    if is_filled:
        compute()
    return Stage("cache", as_command(compute), ignored=("cache",)), (*FILES, "compile")


def double(module: Any, x: Any) -> Any:
    return x * 2


STAGES: dict[str, Callable[[Path, Callable[[Path], None]], tuple[Stage, Iterable[str]]]] = {
    "generate": _generate,
    "encode": _encode,
    "denoise": _denoise,
    "decode": _decode,
    "compiling": _compiling,
    "cache": _cache,
    "filled cache": functools.partial(_cache, is_filled=True),
    "loading": _loading,
    "opening": _opening,
}
