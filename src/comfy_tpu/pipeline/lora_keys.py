"""Matches the keys of a LoRA file with the tensors of a model's checkpoint.

Trainers and tools use different names. For the query projection of Wan's first block:

    transformer.blocks.0.attn1.to_q.lora_A.weight           diffusers and PEFT
    lora_unet_blocks_0_self_attn_q.lora_down.weight         kohya, with .alpha beside it
    diffusion_model.blocks.0.self_attn.q.lora_down.weight   ComfyUI and the original code; lora_A as well

The table of names is made from the model, so that underscores need not be distinguished from dots. diffusers' own
conversion (0.42) is not used: it raises unless a kohya file has every layer of every block with an alpha, and other
files have no alpha outside the blocks and no key of a text encoder; and it silently drops differences of weights.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from comfy_tpu.compiler.checkpoint import Checkpoint, TensorInfo
from comfy_tpu.errors import CheckpointError, InvalidValueError, UnsupportedError, join_names
from comfy_tpu.families.model_family import LoraNames, Rows
from comfy_tpu.families.shared.lora_names import ALL
from comfy_tpu.json_input import parse_json
from comfy_tpu.pipeline.lora_algebra import FACTORS, FORMS, WHOLE, Part, combine, find_form, find_rank
from comfy_tpu.safetensors_input import SAFETENSORS_ERRORS

_PARTS: Mapping[str, Part] = {
    "lora_A.weight": "down",
    "lora_down.weight": "down",
    "lora.down.weight": "down",
    "lora_B.weight": "up",
    "lora_mid.weight": "middle",
    "lora_up.weight": "up",
    "lora.up.weight": "up",
    **{part: part for forms in (FORMS["LoHa"], FORMS["LoKr"]) for form in forms for part in form},
    "alpha": "alpha",
    "dora_scale": "magnitude",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
    "diff": "difference",
    "diff_m": "difference",
    "w_norm": "difference",
    "set_weight": "replacement",
    "diff_b": "bias",
    "b_norm": "bias",
    "lora_B.bias": "bias",
}
_PREFIXES = (
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    "transformer.",
    "unet.",
    "lora_unet_",
    "lora_transformer_",
    "lycoris_",
)
_TEXT_ENCODERS = ("text_encoder", "text_encoders.", "lora_te", "text_model.", "cond_stage_model.", "conditioner.")
_XLABS_KEY = re.compile(r"(.+\.processor\.(?:qkv|proj)_lora\d?)\.(down|up)\.weight")
_ADAPTER_NAME = re.compile(r"(\.(?:lora_[AB]|lora_magnitude_vector))\.[^.]+(\.(?:weight|bias))$")
"""The name that PEFT gives an adapter, "default" where its user gives none."""
_REPETITION = re.compile(r"(?<!\\)[*+?{]")
_REPEATED_GROUP = re.compile(r"\)[*+?{]|\\\d")
_PATTERNS_MAX, _REPEATING_PATTERNS_MAX, _REPETITIONS_MAX = 20_000, 64, 2
"""Files have the names of modules, one for each, or `.*to_q`. With two repetitions and a module's name of 100 letters a
pattern takes 2 ms at most."""
_METADATA = "lora_adapter_metadata"
"""The metadata key under which diffusers stores PEFT's configuration, which includes alpha."""


def holds_factors(names: Iterable[str]) -> bool:
    """Whether the names of a file's tensors are those of a LoRA."""
    return any(_split_key(name)[1] in FACTORS for name in names)


@dataclasses.dataclass(frozen=True)
class Factors:
    """The keys of a file for one tensor of the model, whose combination times `scale` is added to the tensor, or
    replaces it."""

    shape: tuple[int, ...]
    """The shape of the model's tensor."""
    product_shape: tuple[int, ...]
    """The shape of the file's product or difference; another shape than the model's is not merged."""
    rows: Rows
    """The rows of the file's outputs that belong to the tensor."""
    keys: Mapping[Part, str]
    scale: float = 1.0
    magnitude: str | None = None
    """The key of DoRA's magnitudes: of the outputs, or of the inputs where its first dimension is 1."""


@dataclasses.dataclass(frozen=True)
class Target:
    weight: str
    """The name of the model's tensor."""
    bias: str | None
    rows: Rows


@dataclasses.dataclass(frozen=True)
class Targets:
    """The tensors of a model that a LoRA can change."""

    shapes: Mapping[str, tuple[int, ...]]
    by_name: Mapping[str, tuple[Target, ...]]
    """Targets by every name that files use for a module; several where one module of a file is several of the model."""
    examples: tuple[str, ...]
    """Example keys of one module, one of each style."""

    def find(self, module: str) -> tuple[Target, ...]:
        """The tensors of a module, whose name may have several prefixes; empty if the model does not have it."""
        name = module
        while name not in self.by_name and (prefix := next(filter(name.startswith, _PREFIXES), "")):
            name = name.removeprefix(prefix)
        return self.by_name.get(name, ())


def make_targets(tensors: Mapping[str, TensorInfo], names: LoraNames) -> Targets:
    shapes = {name: info.shape for name, info in tensors.items()}
    by_name: dict[str, tuple[Target, ...]] = {}
    blocks: list[list[str]] = []
    for name, shape in shapes.items():
        if name.endswith(".bias"):
            continue
        module = name.removesuffix(".weight")
        bias = f"{module}.bias" if f"{module}.bias" in shapes else None
        aliases = {module: ALL, **names(module, shape)}
        for alias, rows in aliases.items():
            target = Target(name, bias, rows)
            for written in dict.fromkeys((alias, alias.replace(".", "_"))):
                others = by_name.get(written, ())
                if target not in others:  # names that differ by a dot are one name with underscores
                    by_name[written] = (*others, target)
        if ".0." in module and len(shape) == 2:
            blocks.append(list(aliases))
    # Of a block, where LoRAs are; of one with two names, where there is one.
    shown = next((each for each in blocks if len(each) > 1), blocks[0] if blocks else None)
    return Targets(shapes, by_name, _keys(shown[0], shown[1:]) if shown else ())


def _keys(module: str, aliases: Sequence[str]) -> tuple[str, ...]:
    """The names that files may use for a module: diffusers', ComfyUI's and those of kohya's scripts."""
    theirs = aliases[0] if aliases else module
    return (
        f"transformer.{module}.lora_A.weight",
        f"diffusion_model.{theirs}.lora_down.weight",
        f"lora_unet_{theirs.replace('.', '_')}.lora_down.weight",
    )


@dataclasses.dataclass(frozen=True)
class LoraMatch:
    factors: dict[str, Factors]
    """Factors by the name of the model's tensor."""
    misfits: dict[str, Factors]
    """Factors of another shape than the model's tensor, which are not merged."""
    unknown_keys: list[str]
    """Keys that match no tensor of the model."""
    text_keys: list[str]
    known_modules: int
    """The number of the file's modules that fit the model; text encoders' are not counted."""
    unknown_modules: int
    """The number of the file's modules that the model does not have."""
    misfit_modules: int
    """The number of the file's modules that the model has, and of which nothing fits."""

    @property
    def modules(self) -> int:
        return self.known_modules + self.unknown_modules + self.misfit_modules


@dataclasses.dataclass(frozen=True)
class LoraFile:
    path: Path
    checkpoint: Checkpoint
    modules: Mapping[str, Mapping[Part, str]]
    """Keys by module (as named in the file) and part."""
    other_keys: tuple[str, ...]
    """Keys that end in no known part."""
    adapter: Mapping[str, Any]
    """PEFT's configuration if the file holds it, else empty."""
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> LoraFile:
        if not path.is_file():
            raise InvalidValueError(f"lora={path} is not a file; give a .safetensors file", field="lora")
        try:
            checkpoint = Checkpoint.open(path)
        except CheckpointError as error:
            raise CheckpointError(f"lora={path} cannot be used: {error}", field="lora") from error
        modules: dict[str, dict[Part, str]] = {}
        others = []
        for key in checkpoint.tensors:
            if ".oft_" in key:
                raise UnsupportedError(
                    f"lora={path} is an OFT ({key}), which is not supported; use a plain LoRA", field="lora"
                )
            module, part = _split_key(key)
            if part is None:
                others.append(key)
            elif (other := modules.setdefault(module, {}).setdefault(part, key)) != key:
                raise UnsupportedError(
                    f"lora={path} has both {other} and {key}; use a file with one LoRA", field="lora"
                )
        if not modules:
            raise InvalidValueError(
                f"lora={path} holds no LoRA, but {join_names(others, 3)}; expected keys that end in lora_A.weight and "
                "lora_B.weight, or in lora_down.weight and lora_up.weight",
                field="lora",
            )
        try:
            with safe_open(path, framework="pt", device="cpu") as opened:
                metadata = opened.metadata() or {}
        except SAFETENSORS_ERRORS as error:
            raise CheckpointError(
                f"lora={path} cannot be read ({error}); look at the disk, or download it again", field="lora"
            ) from error
        return cls(path, checkpoint, modules, tuple(others), _adapter(path, metadata), metadata)

    def read(self, key: str) -> torch.Tensor:
        try:
            return self.checkpoint.read(key)
        except CheckpointError as error:
            raise CheckpointError(f"lora={error}", field="lora") from error

    def match(self, targets: Targets) -> LoraMatch:
        """The factors for the model's tensors."""
        factors: dict[str, Factors] = {}
        misfits: dict[str, Factors] = {}
        unknown = [key for key in self.other_keys if not key.startswith(_TEXT_ENCODERS)]
        text_keys = [key for key in self.other_keys if key.startswith(_TEXT_ENCODERS)]
        known_modules = unknown_modules = misfit_modules = 0
        for module, parts in self.modules.items():
            found = targets.find(module)
            if not found and module.startswith(_TEXT_ENCODERS):
                text_keys.extend(parts.values())
                continue
            made: dict[str, Factors] = {}
            for target in found:
                made |= self._factors(module, parts, target, targets.shapes)
                if "bias" in parts and target.bias is None:
                    unknown.append(parts["bias"])
            if twice := next((name for name in made if name in factors or name in misfits), None):
                raise InvalidValueError(
                    f"lora={self.path} changes {twice} under two names, one of them {module}; download it again",
                    field="lora",
                )
            fitting = {name: each for name, each in made.items() if each.product_shape == each.shape}
            factors |= fitting
            misfits |= {name: each for name, each in made.items() if name not in fitting}
            if not found:
                unknown_modules += 1
                unknown.extend(parts.values())
            elif made and not fitting:
                misfit_modules += 1
            else:
                known_modules += 1
        return LoraMatch(factors, misfits, unknown, text_keys, known_modules, unknown_modules, misfit_modules)

    def _factors(
        self, module: str, parts: Mapping[Part, str], target: Target, shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Factors]:
        made = {}
        if "bias" in parts and target.bias is not None:
            found = self._shape(parts["bias"])
            bias: Mapping[Part, str] = {"difference": parts["bias"]}
            made[target.bias] = Factors(shapes[target.bias], _cut_rows(found, target.rows), target.rows, bias)
        if parts.keys() <= {"alpha", "bias"}:
            return made
        keys = {part: parts[part] for part in self._form(module, parts)}
        whole, rank = self._combined_shape(module, keys)
        shape = shapes[target.weight]
        product = _fit_kernel(_cut_rows(whole, target.rows), shape)
        scale = 1.0 if rank is None else self._scale(module, parts, max(rank, 1))
        if "magnitude" in parts:
            self._check_magnitude(parts["magnitude"], whole, product)
        made[target.weight] = Factors(shape, product, target.rows, keys, scale, parts.get("magnitude"))
        return made

    def _shape(self, key: str) -> tuple[int, ...]:
        return self.checkpoint.tensors[key].shape

    def _form(self, module: str, parts: Mapping[Part, str]) -> tuple[Part, ...]:
        """The parts that make the module's difference."""
        if form := find_form(parts):
            return form
        kinds = [kind for kind, forms in FORMS.items() if any(part in form for form in forms for part in parts)]
        if len(kinds) > 1:
            raise UnsupportedError(
                f"lora={self.path} has both a {' and a '.join(kinds)} for {module}; use another file", field="lora"
            )
        key = next(key for part, key in parts.items() if part not in ("alpha", "bias"))
        raise InvalidValueError(
            f"lora={self.path} has {key} without {'its other half' if kinds else 'a LoRA'}; download it again",
            field="lora",
        )

    def _combined_shape(self, module: str, keys: Mapping[Part, str]) -> tuple[tuple[int, ...], int | None]:
        """The shape of the module's difference, and its rank."""
        shapes = {part: self._shape(key) for part, key in keys.items()}
        if whole := next((part for part in WHOLE if part in shapes), None):
            return shapes[whole], None
        if shapes.keys() == {"up", "down"}:
            self._check_halves(module, shapes["up"], shapes["down"])
        elif any(len(shape) < 2 for shape in shapes.values()):
            raise self._misfit(module, shapes)
        try:
            product = combine({part: torch.empty(shape, device="meta") for part, shape in shapes.items()})
        except RuntimeError as error:
            raise self._misfit(module, shapes) from error
        return tuple(product.shape), find_rank(shapes)

    def _misfit(self, module: str, shapes: Mapping[Part, tuple[int, ...]]) -> InvalidValueError:
        listed = ", ".join(f"{part} has shape {shape}" for part, shape in shapes.items())
        return InvalidValueError(
            f"lora={self.path}: the factors of {module} do not fit each other: {listed}; download it again",
            field="lora",
        )

    def _check_magnitude(self, key: str, whole: tuple[int, ...], product: tuple[int, ...]) -> None:
        """Raises for DoRA's magnitudes that are none of the outputs or inputs of the module's difference."""
        shape = self._shape(key)
        size = math.prod(shape)
        if shape[:1] == (1,) and len(whole) > 1 and size == whole[1] and size == math.prod(shape[1:2]):
            if product[0] != whole[0]:
                raise UnsupportedError(
                    f"lora={self.path} has magnitudes of inputs ({key}) for a module that is several in the model, "
                    "which is not supported; use a DoRA with magnitudes of outputs, or a plain LoRA",
                    field="lora",
                )
        elif not shape or size != shape[0] or size != whole[0]:
            raise InvalidValueError(
                f"lora={self.path}: {key} has shape {shape}, expected one number for each output or input of a "
                f"difference of shape {whole}; download it again",
                field="lora",
            )

    def _check_halves(self, module: str, up: tuple[int, ...], down: tuple[int, ...]) -> None:
        """Raises InvalidValueError unless up [outputs, rank] and down [rank, inputs] have one rank; both may be kernels
        of convolutions."""
        flat = len(up) >= 2 and len(down) >= 2 and math.prod(up[2:]) == 1
        if flat and up[1] == down[0]:
            return
        found = f"down has rank {down[0]}, up has rank {up[1]}" if flat else f"down has shape {down}, up has shape {up}"
        expected = "expected the same" if flat else "expected (rank, inputs) and (outputs, rank)"
        raise InvalidValueError(
            f"lora={self.path}: the halves of {module} do not fit each other: {found}, {expected}; download it again",
            field="lora",
        )

    def _scale(self, module: str, parts: Mapping[Part, str], rank: int) -> float:
        """alpha / rank; 1 for a file without alpha."""
        if "alpha" in parts:
            tensor = self.read(parts["alpha"])
            alpha = float(tensor) if tensor.numel() == 1 else math.nan
        else:
            alpha = self._alpha_by_pattern(module, self.adapter.get("lora_alpha", rank))
        # Compared, because isfinite raises on a whole number that no float can hold.
        if not isinstance(alpha, (int, float)) or not abs(alpha) <= sys.float_info.max:
            raise CheckpointError(
                f"lora={self.path}: alpha of {module} is not a finite number; download it again", field="lora"
            )
        return alpha / (math.sqrt(rank) if self.adapter.get("use_rslora") else rank)

    def _alpha_by_pattern(self, module: str, otherwise: Any) -> Any:
        """alpha by PEFT's rule: a pattern matches the end of a module's name."""
        patterns = self.adapter.get("alpha_pattern") or {}
        try:
            own = (value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module))
            return next(own, otherwise)
        except (AttributeError, OverflowError, RecursionError, re.error) as error:
            raise CheckpointError(
                f"lora={self.path}: alpha_pattern in its {_METADATA} is not PEFT's ({error}); download it again",
                field="lora",
            ) from error


def _split_key(key: str) -> tuple[str, Part | None]:
    """The module that a key names, and the part."""
    if match := _XLABS_KEY.fullmatch(key):
        return match[1], "down" if match[2] == "down" else "up"
    key = _ADAPTER_NAME.sub(r"\1\2", key)
    suffix = next((suffix for suffix in _PARTS if key.endswith(f".{suffix}")), None)
    if suffix is None:
        return key, None
    module = key.removesuffix(f".{suffix}")
    return f"{module}.modulation" if suffix == "diff_m" else module, _PARTS[suffix]


def _fit_kernel(product: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The model's own shape where the numbers agree, so that a linear layer's difference fits a 1×1×1 kernel."""
    same = len(shape) > 1 and len(product) > 1 and math.prod(product[1:]) == math.prod(shape[1:])
    return (product[0], *shape[1:]) if same else product


def _cut_rows(shape: tuple[int, ...], rows: Rows) -> tuple[int, ...]:
    return (sum(len(range(*piece.indices(shape[0]))) for piece in rows), *shape[1:]) if shape else shape


def _adapter(path: Path, metadata: Mapping[str, str]) -> Mapping[str, Any]:
    text = metadata.get(_METADATA)
    try:
        content = parse_json(text) if text else {}
    except ValueError as error:
        raise CheckpointError(
            f"lora={path}: its {_METADATA} is no JSON ({error}); download it again", field="lora"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"lora={path}: its {_METADATA} is no object; download it again", field="lora")
    adapter = {key.removeprefix("transformer."): value for key, value in content.items()}
    if problem := _pattern_problem(adapter.get("alpha_pattern") or {}):
        raise CheckpointError(
            f"lora={path}: alpha_pattern in its {_METADATA} is not PEFT's ({problem}); download it again", field="lora"
        )
    return adapter


def _pattern_problem(patterns: Any) -> str | None:
    """Why regular expressions of a file are not used. Python's may take for ever: (a+)+$ of thirty letters does."""
    if not isinstance(patterns, dict):
        return "it is no object"
    repeating = [pattern for pattern in patterns if _REPETITION.search(pattern)]
    if len(patterns) > _PATTERNS_MAX or len(repeating) > _REPEATING_PATTERNS_MAX:
        return f"it has {len(patterns)} patterns, {len(repeating)} with repetitions"
    for pattern in repeating:
        if _REPEATED_GROUP.search(pattern) or len(_REPETITION.findall(pattern)) > _REPETITIONS_MAX:
            return f"{pattern[:100]} has a repeated group, or more than {_REPETITIONS_MAX} repetitions"
    return None
