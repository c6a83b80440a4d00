"""Readers of weights, LoRAs, artifacts and model directories."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from safetensors.torch import save

from comfy_tpu.compiler.checkpoint import Checkpoint, TensorInfo
from comfy_tpu.compiler.single_file import open_single_file
from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import ComfyTpuError, UnsupportedError
from comfy_tpu.families.card import VIDEO_NAMES
from comfy_tpu.hub import inventory
from comfy_tpu.hub.download import _read as read_hub_json
from comfy_tpu.pipeline import artifacts, reuse
from comfy_tpu.pipeline.lora_keys import LoraFile, make_targets
from comfy_tpu.pipeline.model_files import DEMO_DIRECTORY, ModelFiles, digest_tensors
from comfy_tpu.pipeline.single_files import _base_card
from comfy_tpu.pipeline.stage_messages import FORMAT, pack_settings, read_embeddings, read_media, read_message, unpack
from comfy_tpu.pipeline.step_checkpoint import StepCheckpoint
from comfy_tpu.porting import targets
from tests.fuzz.hostile_bytes import changed_value, documents, files, safetensors, small_texts, values
from tests.fuzz.reader import Case, named, reader

SETTINGS = json.loads(pack_settings(GenerationSettings()))


def write(directory: Path, case: Case, name: str | None = None) -> Path:
    path = directory / (name or case.name)
    path.write_bytes(case.content)
    return path


# weights

WEIGHT_NAMES = ("weight", "blocks.0.attn1.to_q.weight", "bias", "scaled_fp8", "a.scale_weight", "__metadata__")


@reader(
    "compiler.checkpoint", "compiler.single_file", cases=lambda: named("model.safetensors", safetensors(WEIGHT_NAMES))
)
def read_checkpoint(directory: Path, _: Any, case: Case) -> None:
    opened = open_single_file(write(directory, case))
    for name in opened.tensors:
        opened.read(name)
    opened.close()


@reader("pipeline.model_files", cases=lambda: named("model.safetensors", safetensors(WEIGHT_NAMES)))
def read_weights_fingerprint(directory: Path, _: Any, case: Case) -> None:
    """Of a file that was opened before: its header is one that the library takes."""
    path = write(directory, case)
    Checkpoint.open(path)
    digest_tensors(path, hashlib.sha256())


INDEX = {
    "metadata": {"total_size": 8},
    "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
}


def _write_shards(directory: Path) -> None:
    for number, name in enumerate("ab", 1):
        content = save({name: torch.zeros(1)})
        (directory / f"model-0000{number}-of-00002.safetensors").write_bytes(content)


@reader(
    "compiler.checkpoint", cases=lambda: named("model.safetensors.index.json", documents(INDEX)), prepare=_write_shards
)
def read_checkpoint_index(directory: Path, _: Any, case: Case) -> None:
    write(directory, case)
    Checkpoint.open(directory)


# LoRAs

_MODULES = ("blocks.0.attn1.to_q", "blocks.0.ffn.net.0.proj", "proj_out", "blocks_0_attn1_to_q")
_PREFIXES = ("", "transformer.", "diffusion_model.", "lora_unet_", "text_encoder.", "base_model.model.")
_SUFFIXES = (
    *("lora_A.weight", "lora_B.weight", "lora_down.weight", "lora_up.weight", "alpha", "diff", "diff_b"),
    *("lora_B.bias", "dora_scale", "hada_w1_a", "lokr_w1", "lokr_w2", "diff_m", "weight", "lora_A.default.weight"),
)
LORA_NAMES = tuple(f"{prefix}{module}.{suffix}" for prefix in _PREFIXES for module in _MODULES for suffix in _SUFFIXES)
ADAPTER = {
    "transformer.r": 4,
    "transformer.lora_alpha": 4,
    "transformer.use_rslora": False,
    "transformer.alpha_pattern": {"blocks.0.attn1.to_q": 2, ".*to_q": 8},
}


def _lora_metadata() -> st.SearchStrategy[dict[str, str]]:
    adapters = st.one_of(changed_value(ADAPTER).map(json.dumps), small_texts)
    return st.fixed_dictionaries({}, optional={"lora_adapter_metadata": adapters, "format": small_texts})


def _lora_files() -> st.SearchStrategy[Case]:
    shapes = ((), (1,), (4, 8), (8, 4), (4, 4), (8, 8), (4, 8, 1, 1), (8,), (2, 2), (0, 4))
    return named("lora.safetensors", safetensors(LORA_NAMES, _lora_metadata(), shapes))


@functools.cache
def _targets() -> Any:
    names = {f"{module}.weight": (8, 8) for module in _MODULES[:3]} | {f"{_MODULES[0]}.bias": (8,)}
    tensors = {name: TensorInfo(name, shape, torch.float32, Path()) for name, shape in names.items()}
    return make_targets(tensors, lambda module, shape: {})


@reader("pipeline.lora_keys", cases=_lora_files)
def read_lora(directory: Path, _: Any, case: Case) -> None:
    file = LoraFile.open(write(directory, case))
    for factors in file.match(_targets()).factors.values():
        for key in factors.keys.values():
            file.read(key)


# artifacts


@dataclasses.dataclass(frozen=True)
class Model:
    model_name: str = "demo"
    model_fingerprint: str = "ab12"
    dtype_name: str = "float32"


def _artifact_metadata(stage: str) -> st.SearchStrategy[dict[str, str]]:
    good = {
        **artifacts.describe("a red circle", GenerationSettings(), Model()),
        "artifact": stage,
        "format": str(FORMAT),
        "cut": "",
    }
    notes = st.one_of(values, changed_value([{"name": "x", "fingerprint": "ab", "strength": 1.0}]))
    odd = {
        "settings": changed_value(SETTINGS).map(json.dumps),
        "loras": notes.map(json.dumps),
        **dict.fromkeys(("format", "artifact", "cut", "prompt", "model", "quantize", "preset"), small_texts),
    }
    changes = st.fixed_dictionaries({}, optional=odd)
    absent = st.sets(st.sampled_from(sorted(good)), max_size=1)
    return st.builds(
        lambda changed, removed: {k: v for k, v in (good | changed).items() if k not in removed}, changes, absent
    )


TEXT_NAMES = ("positive.text", "negative.text", "shared.image", "positive.", "other.text", "text")


@reader("pipeline.artifacts", cases=lambda: named("x.safetensors", safetensors(TEXT_NAMES, _artifact_metadata("text"))))
def read_text_artifact(directory: Path, _: Any, case: Case) -> None:
    artifacts.load_text(write(directory, case), Model())


@reader(
    "pipeline.artifacts", cases=lambda: named("x.safetensors", safetensors(("latents",), _artifact_metadata("latents")))
)
def read_latents_artifact(directory: Path, _: Any, case: Case) -> None:
    _, header = artifacts.load_latents(write(directory, case), Model())
    json.loads(header.loras or "[]")


REQUEST = {"prompt": "a red circle", "settings": json.dumps(SETTINGS)}
_STATE_NAMES = ("samples.0", "outputs.0", "segments.0", "samples.1")


def _step_checkpoints() -> st.SearchStrategy[Case]:
    good = {"artifact": "steps", "format": "1", "segment": "0", "done": "1", **REQUEST}
    odd = {
        "settings": changed_value(SETTINGS).map(json.dumps),
        **dict.fromkeys(("artifact", "segment", "done", "digest", "format"), small_texts),
    }
    changes = st.fixed_dictionaries({}, optional=odd)
    return named("x.mp4.checkpoint.safetensors", safetensors(_STATE_NAMES, changes.map(lambda said: good | said)))


@reader("pipeline.step_checkpoint", cases=_step_checkpoints)
def read_step_checkpoint(directory: Path, _: Any, case: Case) -> None:
    """A damaged one is replaced: the run begins at its first step."""
    checkpoint = StepCheckpoint(write(directory, case), 1, report=lambda text: None)
    checkpoint.check()
    checkpoint.begin(REQUEST, steps=4)
    assert checkpoint.restore(torch.zeros(2, 2)) is None, "nothing here has the right digest"


_MESSAGE_NAMES = (
    *("positive.text", "negative.text", "positive@1.text", "shared.image", "latents", "frames"),
    *("image.0", "image.1", "reference.0", *(f"video.{name}" for name in VIDEO_NAMES), "picture.mask"),
)


def _messages() -> st.SearchStrategy[Case]:
    odd = {
        "settings": changed_value(SETTINGS).map(json.dumps),
        "ranges": changed_value({"positive": [[0.0, 0.5], [0.5, 1.0]]}).map(json.dumps),
        "strength": values.map(json.dumps),
        "control_strength": changed_value([1.0, 0.5]).map(json.dumps),
        "prompt": small_texts,
    }
    metadata = st.fixed_dictionaries({"format": st.just(str(FORMAT))}, optional=odd)
    return named("message.safetensors", safetensors(_MESSAGE_NAMES, metadata))


@reader("pipeline.stage_messages", cases=_messages)
def read_stage_message(directory: Path, _: Any, case: Case) -> None:
    path = write(directory, case)
    for opened in (lambda: unpack(case.content), lambda: read_message(path)):
        try:
            message = opened()
        except ComfyTpuError:
            continue
        for look in (read_embeddings, read_media, lambda message: message.settings()):
            try:
                look(message)
            except ComfyTpuError:
                continue


# model directories

CONFIGS = (
    *("model_index.json", "transformer/config.json", "vae/config.json", "text_encoder/config.json"),
    *("scheduler/scheduler_config.json", "generation.json", "presets.json", "shared_parts.json", "preview.json"),
    "reuse.json",
)
_OPTIONAL: dict[str, Any] = {
    "presets.json": {"4step": {"settings": {"num_inference_steps": 4, "guidance_scale": 1.0}, "lora": "x.safetensors"}},
    "shared_parts.json": {"from_parent": ["vae"]},
}


def _config_seed(name: str) -> Any:
    path = DEMO_DIRECTORY / name
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else _OPTIONAL[name]


def _config_files(*names: str) -> st.SearchStrategy[Case]:
    made = {name: named(name, documents(_config_seed(name))) for name in names}
    return st.sampled_from(names).flatmap(made.__getitem__)


def _copy_demo(directory: Path) -> Path:
    """Beside it, what shared parts would be."""
    copy = directory / "models" / "demo"
    shutil.copytree(DEMO_DIRECTORY, copy, ignore=shutil.ignore_patterns("image_to_video"))
    shutil.copytree(DEMO_DIRECTORY / "vae", directory / "models" / "vae")
    return copy


@dataclasses.dataclass(frozen=True)
class Replaced:
    """One file of a model directory for one case."""

    path: Path
    before: bytes | None

    @classmethod
    def write(cls, directory: Path, case: Case) -> Replaced:
        path = directory / case.name
        before = path.read_bytes() if path.is_file() else None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(case.content)
        return cls(path, before)

    def restore(self) -> None:
        if self.before is None:
            self.path.unlink()
        else:
            self.path.write_bytes(self.before)


@reader("pipeline.model_files", "pipeline.reuse", cases=lambda: _config_files(*CONFIGS), prepare=_copy_demo, share=0.5)
def read_model_directory(_: Path, model: Path, case: Case) -> None:
    replaced = Replaced.write(model, case)
    try:
        opened = ModelFiles.open(model)
        for look in (
            lambda: opened.defaults,
            lambda: opened.presets,
            lambda: opened.preview_colours,
            lambda: opened.latent_statistics,
            lambda: opened.fingerprint,
            lambda: opened.scheduler(opened.defaults),
            lambda: opened.embedding_shapes(opened.defaults),
            lambda: reuse.find_curve(opened),
        ):
            try:
                look()
            except ComfyTpuError:
                continue
    finally:
        replaced.restore()


@reader("pipeline.model_files", cases=lambda: _config_files("transformer/config.json"), prepare=_copy_demo, share=0.05)
def read_architecture(_: Path, model: Path, case: Case) -> None:
    """Builds the module that a configuration describes, without weights, and counts its work."""
    replaced = Replaced.write(model, case)
    try:
        opened = ModelFiles.open(model, to_run=False)
        opened.workload(opened.defaults)
    finally:
        replaced.restore()


def _tokenizer_files() -> st.SearchStrategy[Case]:
    return _config_files("tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json")


@reader("pipeline.model_files", "pipeline.plain_tokenizer", cases=_tokenizer_files, prepare=_copy_demo, share=0.2)
def read_tokenizer(_: Path, model: Path, case: Case) -> None:
    replaced = Replaced.write(model, case)
    try:
        opened = ModelFiles.open(model)
        tokenizer = opened.tokenizer("tokenizer", may_be_plain=True)
        if hasattr(tokenizer, "encode_rows"):
            tokenizer.encode_rows(["a red circle", ""], 16)
    finally:
        replaced.restore()


@reader(
    "hub.inventory",
    "comfy.models",
    cases=lambda: _config_files(*CONFIGS[:5], *_OPTIONAL),
    prepare=_copy_demo,
    share=0.5,
)
def read_model_list(directory: Path, model: Path, case: Case) -> None:
    """A list of models never fails for one of them."""
    replaced = Replaced.write(model, case)
    try:
        for _ in inventory._scan_folder(directory / "models"):
            pass
    except ComfyTpuError as error:
        raise AssertionError("the list fails for one model in it") from error
    finally:
        replaced.restore()


def _make_cache(directory: Path) -> Path:
    root = directory / "models--owner--name"
    _copy_demo(directory / "made")
    (root / "snapshots").mkdir(parents=True)
    (directory / "made" / "models" / "demo").rename(root / "snapshots" / "abc")
    (root / "refs").mkdir()
    return root


@reader("hub.inventory", cases=lambda: named("refs/main", files(b"abc", b"../../..", b"\xff\xfe")), prepare=_make_cache)
def read_hub_cache(directory: Path, root: Path, case: Case) -> None:
    replaced = Replaced.write(root, case)
    try:
        for model in inventory._scan_cache(directory):
            assert model.local is not None
            assert model.local.directory.parent == root / "snapshots", model.local
    except ComfyTpuError as error:
        raise AssertionError("the list fails for one model in it") from error
    finally:
        replaced.restore()


@reader("hub.download", cases=lambda: named("model_index.json", documents(_config_seed("model_index.json"))))
def read_downloaded_index(directory: Path, _: Any, case: Case) -> None:
    read_hub_json(write(directory, case))


@reader("pipeline.single_files", cases=lambda: _config_files(*CONFIGS[:2], CONFIGS[4]), prepare=_copy_demo)
def read_base_directory(_: Path, model: Path, case: Case) -> None:
    replaced = Replaced.write(model, case)
    try:
        _base_card(str(model), model)
    finally:
        replaced.restore()


# Parsed for the first case: the sources of diffusers are the same for all.
_find_package = functools.cache(targets._find_package)


@reader("porting.targets", cases=lambda: _config_files(*CONFIGS[:3]), prepare=_copy_demo, share=0.3)
def read_ported_directory(_: Path, model: Path, case: Case) -> None:
    replaced = Replaced.write(model, case)
    try:
        with mock.patch.object(targets, "_find_package", _find_package):
            targets.find_targets(str(model))
    finally:
        replaced.restore()


_SOURCE = b"""import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, size=4):
        super().__init__()
        self.layer = nn.Linear(size, size)

    def forward(self, x):
        if x.sum() > 0:
            return self.layer(x)[x > 0].item()
        return x
"""


@reader(
    "porting.source", cases=lambda: named("net.py", files(_SOURCE, b"(" * 300, b"-" * 5000 + b"1", b"x = " + b"[" * 90))
)
def read_ported_source(directory: Path, _: Any, case: Case) -> None:
    """Parsed, and not imported."""
    from comfy_tpu.porting.source import Package

    try:
        Package(directory).module(write(directory, case))
    except UnsupportedError:
        return
