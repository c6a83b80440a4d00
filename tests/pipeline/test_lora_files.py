"""LoRA files that cannot be used, or not all of them: one sentence each, before anything is loaded."""

import dataclasses
import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from comfy_tpu.compiler.checkpoint import TensorInfo
from comfy_tpu.config import Lora
from comfy_tpu.errors import CheckpointError, ComfyTpuError, InvalidValueError, UnsupportedError
from comfy_tpu.families.model_family import Denoiser, Rows
from comfy_tpu.pipeline.lora import Loras, open_loras
from comfy_tpu.pipeline.lora_keys import LoraFile, make_targets
from comfy_tpu.pipeline.model_files import ModelFiles
from tests.pipeline import small_loras, small_pipeline
from tests.pipeline.small_loras import random, write

Q = "transformer.blocks.0.attn1.to_q"
GOOD = {f"{Q}.lora_A.weight": random(4, 96, seed=1), f"{Q}.lora_B.weight": random(96, 4, seed=2)}


def opened(path: Path, strength: Any = 1.0) -> Loras:
    return open_loras([Lora(path, strength)], ModelFiles.open(small_pipeline.directory()))


def with_(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    return GOOD | {f"{Q}.{name.replace('__', '.')}": tensor for name, tensor in changes.items()}


def of_flux() -> dict[str, torch.Tensor]:
    name = "lora_unet_double_blocks_0_img_attn_qkv"
    return {f"{name}.lora_down.weight": torch.zeros(4, 96), f"{name}.lora_up.weight": torch.zeros(288, 4)}


def without_up() -> dict[str, torch.Tensor]:
    return {f"{Q}.lora_A.weight": torch.zeros(4, 96)}


def under_two_names() -> dict[str, torch.Tensor]:
    return GOOD | {
        "diffusion_model.blocks.0.self_attn.q.lora_A.weight": torch.zeros(4, 96),
        "diffusion_model.blocks.0.self_attn.q.lora_B.weight": torch.zeros(96, 4),
    }


REFUSED: dict[str, tuple[Callable[[], dict[str, torch.Tensor]], type[ComfyTpuError], str]] = {
    "a model": (
        lambda: {"blocks.0.attn1.to_q.weight": torch.zeros(96, 96)},
        InvalidValueError,
        "holds no LoRA, but blocks.0.attn1.to_q.weight; expected keys that end in lora_A.weight and lora_B.weight",
    ),
    "a LoRA of another family": (
        of_flux,
        InvalidValueError,
        r"fits nothing in model .*, it holds lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight, .*; expected "
        r"keys such as transformer.blocks.0.attn1.to_k.lora_A.weight or "
        r"diffusion_model.blocks.0.self_attn.k.lora_down.weight or "
        r"lora_unet_blocks_0_self_attn_k.lora_down.weight: use a LoRA made for Wan 2\.1",
    ),
    "a text encoder's alone": (
        lambda: {"lora_te_x.lora_down.weight": torch.zeros(4, 8), "lora_te_x.lora_up.weight": torch.zeros(8, 4)},
        InvalidValueError,
        "fits nothing in model .*, it holds lora_te_x.lora_down.weight",
    ),
    "another size": (
        lambda: with_(lora_A__weight=torch.zeros(4, 64)),
        InvalidValueError,
        r"changes blocks.0.attn1.to_q.weight by a tensor of shape \(96, 64\), and in model .* it has shape \(96, 96\): "
        r"use a LoRA made for this size of Wan 2\.1",
    ),
    "ranks that differ": (
        lambda: with_(lora_A__weight=torch.zeros(5, 96)),
        InvalidValueError,
        f": the halves of {Q} do not fit each other: down has rank 5, up has rank 4, expected the same; download it",
    ),
    "halves that make no product": (
        lambda: with_(lora_B__weight=torch.zeros(96)),
        InvalidValueError,
        rf"{Q} do not fit each other: down has shape \(4, 96\), up has shape \(96,\), expected \(rank, inputs\) and",
    ),
    "an up half with a kernel": (
        lambda: with_(lora_B__weight=torch.zeros(96, 4, 3)),
        InvalidValueError,
        r"down has shape \(4, 96\), up has shape \(96, 4, 3\)",
    ),
    "a bias of another size": (
        lambda: {f"{Q}.diff_b": torch.zeros(95)},
        InvalidValueError,
        r"to_q.bias by .*\(95,\)",
    ),
    "half of a pair": (without_up, InvalidValueError, f"has {Q}.lora_A.weight without its other half; download it"),
    "one layer under two names": (under_two_names, InvalidValueError, "changes blocks.0.attn1.to_q.weight under two"),
    "a pair and a difference": (
        lambda: with_(diff=torch.zeros(96, 96)),
        UnsupportedError,
        f"has both a LoRA and a difference for {Q}",
    ),
    "magnitudes alone": (
        lambda: {f"{Q}.dora_scale": torch.ones(96, 1)},
        InvalidValueError,
        "has .*dora_scale without a LoRA; download it again",
    ),
    "magnitudes of another size": (
        lambda: with_(dora_scale=torch.ones(95, 1)),
        InvalidValueError,
        r"to_q.dora_scale has shape \(95, 1\), expected one number for each output or input of a .* \(96, 96\)",
    ),
    "half of a LoKr": (
        lambda: {f"{Q}.lokr_w1": torch.ones(8, 8)},
        InvalidValueError,
        "has .*lokr_w1 without its other half; download it again",
    ),
    "a LoHa of two ranks": (
        lambda: {
            f"{Q}.hada_w{number}_{letter}": torch.ones((96, 4) if letter == "a" else (3, 96))
            for number in (1, 2)
            for letter in "ab"
        },
        InvalidValueError,
        r"the factors of .*to_q do not fit each other: hada_w1_a has shape \(96, 4\), hada_w1_b has shape \(3, 96\)",
    ),
    "a middle matrix alone": (
        lambda: {f"{Q}.lokr_t2": torch.ones(8, 8)},
        InvalidValueError,
        "has .*lokr_t2 without its other half; download it again",
    ),
    "a middle matrix of another rank": (
        lambda: {
            f"{Q}.lora_up.weight": torch.ones(96, 4),
            f"{Q}.lora_mid.weight": torch.ones(4, 3),
            f"{Q}.lora_down.weight": torch.ones(4, 96),
        },
        InvalidValueError,
        r"the factors of .*to_q do not fit each other: up has shape \(96, 4\), middle has shape \(4, 3\), down has",
    ),
    "an OFT": (
        lambda: {f"{Q}.oft_blocks": torch.ones(8, 8)},
        UnsupportedError,
        "is an OFT .*oft_blocks.*; use a plain LoRA",
    ),
    "two adapters": (
        lambda: with_(lora_A__own__weight=torch.zeros(4, 96)),
        UnsupportedError,
        f"has both {Q}.lora_A.own.weight and {Q}.lora_A.weight; use a file with one LoRA",
    ),
    "a LoRA and a replacement": (
        lambda: with_(set_weight=torch.zeros(96, 96)),
        UnsupportedError,
        f"has both a LoRA and a replacement for {Q}",
    ),
    "alpha that is no number": (
        lambda: with_(alpha=torch.tensor(math.nan)),
        CheckpointError,
        f"{Q}.alpha holds NaN or infinity; download it again",
    ),
    "several alphas": (lambda: with_(alpha=torch.ones(2)), CheckpointError, f"alpha of {Q} is not a finite number"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    make, kind, message = REFUSED[case]
    path = write(tmp_path / "a.safetensors", make())
    with pytest.raises(kind, match=message) as caught:
        opened(path)
    assert str(caught.value).startswith(f"lora={path} ") or str(caught.value).startswith(f"lora={path}: ")


@pytest.mark.parametrize("strength", [math.nan, math.inf, "strong", None, True])
def test_strength_is_a_finite_number(strength: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", GOOD)
    with pytest.raises(InvalidValueError, match=f"has strength {re.escape(repr(strength))}, which is not a finite"):
        opened(path, strength)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"is not a file; give a \.safetensors file"):
        opened(tmp_path / "none.safetensors")


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save(GOOD, path)
    with pytest.raises(CheckpointError, match=r"lora=.*a\.pt cannot be used: .* such files are pickles"):
        opened(path)


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", None])
def test_truncated_and_damaged_files(content: bytes | None, tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", GOOD)
    path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    with pytest.raises(
        CheckpointError, match=r"cannot be read as safetensors .* truncated, damaged .*download it again"
    ):
        opened(path)


def test_a_file_that_the_system_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch, which maps the file, raises RuntimeError for it."""
    path = write(tmp_path / "a.safetensors", small_loras.diffusers_style())

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("unable to open file in read-only mode: Input/output error (5)")

    monkeypatch.setattr("comfy_tpu.pipeline.lora_keys.safe_open", refuse)
    with pytest.raises(CheckpointError, match=r"lora=.*a\.safetensors cannot be read \(unable to open .*; look at the"):
        LoraFile.open(path)


def test_metadata_that_cannot_be_read(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "a.safetensors"
    for text in ("{", "[1]"):
        save_file(GOOD, path, {"lora_adapter_metadata": text})
        with pytest.raises(CheckpointError, match="its lora_adapter_metadata is no"):
            opened(path)


@pytest.mark.parametrize("pattern", [["to_q"], {"*": 2}, {"(": 2}], ids=repr)
def test_a_pattern_that_is_none(pattern: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", GOOD, {"alpha_pattern": pattern})
    with pytest.raises(CheckpointError, match=r"alpha_pattern in its \w+ is not PEFT's \(.*\); download"):
        opened(path)


def test_numbers_that_are_none_are_found_when_they_are_read(tmp_path: Path) -> None:
    tensors = with_(lora_B__weight=torch.full((96, 4), math.nan))
    loras = opened(write(tmp_path / "a.safetensors", tensors))
    with pytest.raises(CheckpointError, match="lora_B.weight holds NaN or infinity; download it again"):
        loras.read("blocks.0.attn1.to_q.weight")


def test_unknown_keys_are_listed_and_the_rest_is_applied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    far = "transformer.blocks.9.attn1.to_q"
    tensors = GOOD | {
        f"{far}.lora_A.weight": torch.zeros(4, 96),
        f"{far}.lora_B.weight": torch.zeros(96, 4),
        "diffusion_model.blocks.0.diff_x": torch.zeros(1, 6, 96),
        **{f"unknown.{letter}": torch.zeros(1) for letter in "abcdefgh"},
        **{f"lora_unet_unknown_{number}_x": torch.zeros(1) for number in range(30)},
        "text_encoder.x.lora_A.weight": torch.zeros(4, 8),
        "text_encoder.x.lora_B.weight": torch.zeros(8, 4),
    }
    with caplog.at_level(logging.WARNING):
        loras = opened(write(tmp_path / "a.safetensors", tensors))
    assert "blocks.0.attn1.to_q.weight" in loras
    assert "blocks.9.attn1.to_q.weight" not in loras
    text, unknown = (record.getMessage() for record in caplog.records)
    assert "its 2 text encoder tensors are ignored" in text
    for key in ("blocks.0.diff_x", f"{far}.lora_A.weight", f"{far}.lora_B.weight"):
        assert key in unknown
    assert "unknown.g, unknown.h" in unknown, "every one"
    assert "lora_unet_unknown_*_x (30)" in unknown
    assert unknown.endswith("the rest is applied")
    assert "text_encoder" not in unknown


def test_weights_of_another_shape_are_named_and_not_merged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As the patch embedding of a LoRA for text-to-video on an image-to-video model."""
    tensors = with_(diff_b=torch.ones(96)) | {
        "diffusion_model.patch_embedding.diff": torch.zeros(96, 36, 1, 2, 2),
        "diffusion_model.patch_embedding.diff_b": torch.ones(96),
    }
    with caplog.at_level(logging.WARNING):
        loras = opened(write(tmp_path / "a.safetensors", tensors))
    (record,) = caplog.records
    assert "patch_embedding.weight (96, 36, 1, 2, 2) instead of (96, 4, 1, 2, 2) is not merged" in record.getMessage()
    assert record.getMessage().endswith("the rest is applied")
    assert "patch_embedding.weight" not in loras
    assert all(name in loras for name in ("patch_embedding.bias", "blocks.0.attn1.to_q.weight"))


def test_a_module_of_theirs_may_be_several_of_ours(tmp_path: Path) -> None:
    """As the fused query, key and value of Flux: the down matrix is shared, the outputs are divided."""
    tensors = {
        f"to_{letter}.weight": TensorInfo(f"to_{letter}.weight", (8, 6), torch.float32, tmp_path) for letter in "qkv"
    }

    def names(module: str, shape: tuple[int, ...]) -> dict[str, Rows]:
        start = "qkv".index(module[-1]) * shape[0]
        return {"qkv": (slice(start, start + shape[0]),)}

    path = write(
        tmp_path / "a.safetensors",
        {
            "diffusion_model.qkv.lora_A.weight": random(2, 6, seed=1),
            "diffusion_model.qkv.lora_B.weight": random(24, 2, seed=2),
        },
    )
    factors = LoraFile.open(path).match(make_targets(tensors, names)).factors
    assert {name: (part.rows[0].start, part.product_shape) for name, part in factors.items()} == {
        "to_q.weight": (0, (8, 6)),
        "to_k.weight": (8, (8, 6)),
        "to_v.weight": (16, (8, 6)),
    }


def test_a_family_without_names_takes_those_of_diffusers(tmp_path: Path) -> None:
    files = ModelFiles.open(small_pipeline.directory())
    (names,) = (field.default for field in dataclasses.fields(Denoiser) if field.name == "lora_names")
    denoiser = dataclasses.replace(files.family.denoiser, lora_names=names)
    ported = dataclasses.replace(files, family=dataclasses.replace(files.family, denoiser=denoiser))
    path = write(tmp_path / "a.safetensors", small_loras.diffusers_style())
    made, expected = (open_loras([Lora(path)], given).read("blocks.1.ffn.net.2.weight") for given in (ported, files))
    assert torch.equal(made.up, expected.up)
    assert torch.equal(made.down, expected.down)
    of_wan = write(tmp_path / "wan.safetensors", small_loras.kohya_style())
    with pytest.raises(
        InvalidValueError, match=r"such as transformer\.blocks\.0\.\S+\.lora_A\.weight or diffusion_model\."
    ):
        open_loras([Lora(of_wan)], ported)


def test_every_module_of_wan_is_known_by_its_original_name() -> None:
    """The names of Wan's own code, written out for one block."""
    files = ModelFiles.open(small_pipeline.directory())
    targets = make_targets(files.checkpoint(files.family.transformer).tensors, files.family.denoiser.lora_names)
    attention = [
        f"{kind}.{part}" for kind in ("self_attn", "cross_attn") for part in ("q", "k", "v", "o", "norm_q", "norm_k")
    ]
    names = [f"blocks.0.{name}" for name in (*attention, "ffn.0", "ffn.2", "norm3", "modulation")]
    names += ["patch_embedding", "time_projection.1", "head.head", "head.modulation"]
    names += [f"{kind}_embedding.{number}" for kind in ("text", "time") for number in (0, 2)]
    found = {target.weight for name in names for target in targets.find(f"diffusion_model.{name}")}
    own = [name for name in targets.shapes if not name.endswith(".bias")]
    assert found == {name for name in own if not name.startswith(("blocks.1", "blocks.2"))}
    assert all(targets.find(f"lora_unet_{name.replace('.', '_')}") for name in names)


def test_styles_of_one_lora_are_one_change(tmp_path: Path) -> None:
    name = "blocks.1.ffn.net.2.weight"
    made = [
        opened(write(tmp_path / f"{index}.safetensors", tensors)).read(name)
        for index, tensors in enumerate(
            [
                small_loras.diffusers_style(),
                small_loras.kohya_style(alpha=4.0),
                small_loras.comfy_style(alpha=None),
                {
                    key.replace("transformer.", "base_model.model."): t
                    for key, t in small_loras.diffusers_style().items()
                },
                *(
                    {
                        key.replace("transformer.", prefix).replace(".weight", ".my_adapter.weight"): t
                        for key, t in small_loras.diffusers_style().items()
                    }
                    for prefix in ("base_model.model.transformer.", "base_model.model.diffusion_model.", "unet.")
                ),
            ]
        )
    ]
    for change in made[1:]:
        assert torch.equal(change.up, made[0].up)
        assert torch.equal(change.down, made[0].down)
