"""Programs as text files, for looking at: what JAX traced, what it lowered, and what the compiler made of it."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import jax

from comfy_tpu.compiler.program import ProgramStages
from comfy_tpu.pipeline.atomic import replacing, write_errors

SUFFIXES = ("jaxpr.txt", "stablehlo.mlir", "hlo.txt")
"""Of the three files of a program: its jaxpr, its StableHLO, and the compiler's optimised HLO."""


def dump_program(directory: Path, name: str, size: str, stages: ProgramStages) -> list[Path]:
    """Writes the three texts of a program and returns their paths.

    `name` is the program's, "transformer.denoise_step", and `size` that of the request. The end of a file's name is a
    hash of the shapes, dtypes and shardings of its inputs: the same program has the same name in every run.
    """
    stem = "-".join(filter(None, (name, size.replace("×", "x"), _signature(stages.lowered))))
    stem = re.sub(r"[^\w.=-]+", "-", stem)
    texts = (
        str(stages.traced.jaxpr),
        stages.lowered.as_text(),
        stages.compiled.as_text() or "this platform does not give the text of a compiled program\n",
    )
    paths = [directory / f"{stem}.{suffix}" for suffix in SUFFIXES]
    for path, text in zip(paths, texts, strict=True):
        with replacing(path, field="dump") as partial, write_errors(path, field="dump"):
            partial.write_text(text, encoding="utf-8")
    return paths


def _signature(lowered: jax.stages.Lowered) -> str:
    described = [str(leaf) for leaf in jax.tree.leaves(lowered.in_avals)]
    described.append(str(lowered.in_tree))
    return hashlib.sha256("\n".join(described).encode()).hexdigest()[:8]
