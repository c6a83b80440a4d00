"""The page: every class in a process of its own, because XLA keeps what it compiled until its process ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tools.versions import installed_versions

PACKAGES = ("torch", "jax", "torchax", "diffusers")
SECONDS_MAX = 900

TRANSFORMERS = (
    *("WanTransformer3DModel", "FluxTransformer2DModel", "Flux2Transformer2DModel", "CogVideoXTransformer3DModel"),
    *("LTXVideoTransformer3DModel", "MochiTransformer3DModel", "QwenImageTransformer2DModel"),
    *("Lumina2Transformer2DModel", "ZImageTransformer2DModel", "HunyuanVideoTransformer3DModel"),
    *("HunyuanVideo15Transformer3DModel", "HunyuanDiT2DModel", "SD3Transformer2DModel", "PixArtTransformer2DModel"),
    *("AuraFlowTransformer2DModel", "SanaTransformer2DModel", "DiTTransformer2DModel", "AllegroTransformer3DModel"),
    *("CogView4Transformer2DModel", "CosmosTransformer3DModel", "ChromaTransformer2DModel", "StableAudioDiTModel"),
    *("LatteTransformer3DModel", "PriorTransformer", "HiDreamImageTransformer2DModel", "OmniGenTransformer2DModel"),
    *("UNet2DConditionModel", "UNet2DModel"),
)
AUTOENCODERS = (
    *("AutoencoderKL", "AutoencoderKLWan", "AutoencoderKLCogVideoX", "AutoencoderKLLTXVideo", "AutoencoderKLMochi"),
    *("AutoencoderKLHunyuanVideo", "AutoencoderKLQwenImage", "AutoencoderKLCosmos", "AutoencoderKLAllegro"),
    *("AutoencoderKLTemporalDecoder", "AutoencoderDC", "AutoencoderTiny", "AutoencoderOobleck", "VQModel"),
)
CLASSES = (*TRANSFORMERS, *AUTOENCODERS)


def versions() -> dict[str, str]:
    return installed_versions(PACKAGES)


def versions_line() -> str:
    return "Made with " + ", ".join(f"{name} {version}" for name, version in versions().items()) + "."


def write_page(path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        rows = list(pool.map(row, CLASSES))
    verdicts = [cells[1] for cells in rows]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(sorted(verdicts)))
    lines = [
        "# Models of diffusers, checked",
        "",
        "What `comfy-tpu port check` says of them; written by `make porting-table`, do not edit it.",
        versions_line(),
        "",
        "*Error* is of a small model with random weights, compiled for a CPU, against PyTorch, both in float32. "
        "*Stops*, *changes* and *costs* count lines that the small model came to. An autoencoder is its decoder. "
        "A family replaces what stops or costs in its own models (Wan's strided writes, HunyuanVideo-1.5's `if`): "
        "this is about diffusers' classes as they are.",
        "",
        f"{len(CLASSES)} classes: {counts}.",
        "",
        *_table(("class", "verdict", "error", "stops", "changes", "costs", "why"), rows),
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def row(name: str) -> tuple[str, ...]:
    done = subprocess.run(
        [sys.executable, "-m", "comfy_tpu.cli", "port", "check", name, "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS_MAX,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    if done.returncode not in (0, 1) or not done.stdout:
        raise RuntimeError(f"{name}: the check itself failed: {done.stderr[-2000:]}")
    (check,) = json.loads(done.stdout)["checks"]
    error = "" if check["error"] is None else f"{check['error']:.0e}"
    return (f"`{name}`", check["verdict"], error, *_counts(check), _why(check))


def _counts(check: Mapping[str, Any]) -> Iterable[str]:
    reached = [finding for finding in check["findings"] if finding["reached"] is not False]
    for severity in ("stops", "changes", "costs"):
        yield str(sum(finding["severity"] == severity for finding in reached) or "")


def _why(check: Mapping[str, Any]) -> str:
    """Where it does not run: the first reason, with files named from their package on."""
    if check["verdict"] == "will run":
        return ""
    stopping = [each for each in check["findings"] if each["severity"] == "stops" and each["reached"] is not False]
    if check["verdict"] == "will not run" and stopping:
        first = stopping[0]
        where = f", {_short(first['file'])}:{first['line']}: `{first['code']}`" if first["file"] else ""
        return f"{first['trap']}{where}".replace("|", "\\|")
    return _short(check["why"]).replace("|", "\\|")


def _short(text: str) -> str:
    return " ".join(word.rpartition("site-packages/")[2] if "site-packages/" in word else word for word in text.split())


def _table(head: Iterable[str], body: Iterable[Iterable[str]]) -> list[str]:
    head = list(head)
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body)]
