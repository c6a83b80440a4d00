"""LoRA files for a model: opened, checked against the model, and read while the model's weights are loaded."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

import torch

from comfy_tpu.compiler.merging import Decomposition, WeightChange
from comfy_tpu.config import Lora, LoraNoise
from comfy_tpu.errors import InvalidValueError, join_names
from comfy_tpu.families.model_family import Rows
from comfy_tpu.families.registry import family_cards
from comfy_tpu.families.shared.lora_names import ALL
from comfy_tpu.pipeline.lora_algebra import combine
from comfy_tpu.pipeline.lora_keys import Factors, LoraFile, LoraMatch, Targets, make_targets
from comfy_tpu.pipeline.model_files import ModelFiles, digest_tensors

logger = logging.getLogger(__name__)


_CHANGE_MAX = 1e12
"""Far below what float32 can add, so the merged weights need no check of their own on the devices. A norm squares what
comes out of them: from 1e19 on that is infinite, the norm's result 0, and a broken file gives a plausible video. No
trained LoRA comes near it."""


@dataclasses.dataclass(frozen=True)
class OpenLora:
    """A LoRA file that fits the model, and the changes that it makes to tensors of the model's checkpoint."""

    file: LoraFile
    strength: float
    noise: str
    """The transformer that the LoRA is for: "all", or one of two, "high" or "low"."""
    fingerprint: str
    matched: LoraMatch

    @property
    def factors(self) -> Mapping[str, Factors]:
        return self.matched.factors

    def change(self, name: str) -> WeightChange:
        factors = self.factors[name]
        if factors.magnitude is None and factors.keys.keys() == {"up", "down"}:
            up = self._read(factors.keys["up"], factors.rows).flatten(1)
            down = self._read(factors.keys["down"]).reshape(-1, *factors.shape[1:])
            # Into up, which the strength and alpha / rank then reach in float32 whatever the file is in.
            return self._check_overflow(name, WeightChange(up * (self.strength * factors.scale), down))
        whole = combine({part: self._read(key) for part, key in factors.keys.items()})
        if "replacement" in factors.keys:
            replacement = _take_rows(whole, factors.rows).reshape(factors.shape)
            return self._check_overflow(name, WeightChange(replacement=replacement))
        difference = _take_rows(whole, factors.rows).reshape(factors.shape) * factors.scale
        if factors.magnitude is None:
            return self._check_overflow(name, WeightChange(difference=difference * self.strength))
        magnitude = Decomposition(difference, self._read_magnitude(factors, factors.magnitude), self.strength)
        return self._check_overflow(name, WeightChange(decompositions=(magnitude,)))

    def _read(self, key: str, rows: Rows = ALL) -> torch.Tensor:
        return _take_rows(self.file.read(key), rows).float()

    def _read_magnitude(self, factors: Factors, key: str) -> torch.Tensor:
        """The magnitudes with as many dimensions as the weight has."""
        magnitude, ones = self._read(key), (1,) * (len(factors.shape) - 2)
        if magnitude.shape[0] == 1 and magnitude.ndim > 1:
            return magnitude.reshape(1, -1, *ones)
        return _take_rows(magnitude, factors.rows).reshape(-1, 1, *ones)

    def _check_overflow(self, name: str, change: WeightChange) -> WeightChange:
        if not change.bound < _CHANGE_MAX:
            raise InvalidValueError(
                f"lora={self.file.path} changes {name} by up to {change.bound:.2g} at strength {self.strength:g}, more "
                f"than {_CHANGE_MAX:g}, beyond which norms overflow; use a smaller strength, or another file",
                field="lora",
            )
        return change


@dataclasses.dataclass(frozen=True)
class Loras:
    """The LoRAs of a model, as the changes that `Component.load` adds to weights."""

    opened: tuple[OpenLora, ...] = ()

    def for_transformer(self, transformer: int) -> Loras:
        """The LoRAs of the family's first or second transformer."""
        return Loras(tuple(lora for lora in self.opened if lora.noise in ("all", NOISE[transformer])))

    @property
    def key(self) -> tuple[tuple[str, float], ...]:
        """Identifies the changed weights; empty if the weights are those of the model itself."""
        return tuple((lora.fingerprint, lora.strength) for lora in self._active)

    @property
    def label(self) -> str:
        return "".join(f" + {lora.file.path.name}:{lora.strength:g}" for lora in self._active)

    @property
    def text(self) -> str:
        """JSON for the metadata of outputs; empty without LoRAs, so that the metadata of older files stay equal."""
        notes = [
            {"name": lora.file.path.name, "fingerprint": lora.fingerprint, "strength": lora.strength}
            | ({"noise": lora.noise} if lora.noise != "all" else {})
            for lora in self._active
        ]
        return json.dumps(notes, ensure_ascii=False) if notes else ""

    def __contains__(self, name: object) -> bool:
        return any(name in lora.factors for lora in self._active)

    def read(self, name: str) -> WeightChange:
        """The change of a tensor by all files, concatenated along the rank, so that the weight is rounded once. Of
        several replacements, the last one's."""
        changes = [lora.change(name) for lora in self._active if name in lora.factors]
        ups = [change.up for change in changes if change.up is not None]
        downs = [change.down for change in changes if change.down is not None]
        differences = [change.difference for change in changes if change.difference is not None]
        replacements = [change.replacement for change in changes if change.replacement is not None]
        return WeightChange(
            torch.cat(ups, dim=1) if ups else None,
            torch.cat(downs) if downs else None,
            torch.stack(differences).sum(0) if differences else None,
            tuple(each for change in changes for each in change.decompositions),
            replacements[-1] if replacements else None,
        )

    @property
    def reads_weights(self) -> bool:
        changes = (factors for lora in self._active for factors in lora.factors.values())
        return any(factors.magnitude is not None or "replacement" in factors.keys for factors in changes)

    def close(self) -> None:
        for lora in self.opened:
            lora.file.checkpoint.close()

    @property
    def _active(self) -> list[OpenLora]:
        return [lora for lora in self.opened if lora.strength != 0]


def _take_rows(tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
    return tensor if rows == ALL else torch.cat([tensor[piece] for piece in rows])


NO_LORAS = Loras()

NOISE = ("high", "low")
"""The noise levels of the first and the second of two transformers."""


def open_loras(loras: Sequence[Lora], files: ModelFiles) -> Loras:
    """Opens the files and checks all that their headers show, before a weight is loaded."""
    if not loras:
        return NO_LORAS
    spec = files.family.transformer
    found = files.checkpoint(spec).tensors
    tensors = {spec.rename(name) if spec.rename else name: info for name, info in found.items()}
    targets = make_targets(tensors, files.family.denoiser.lora_names)
    opened = tuple(_open(lora, targets, files) for lora in loras)
    _check_pairs(opened, files)
    return Loras(opened)


_NOISE_WORDS = r"(?:^|[^a-z])(high|low)[-_ ]?noise"


def noise_of_name(path: Path) -> str | None:
    """The transformer of two that a file is for, as its name says: "high" or "low"; None where it says nothing."""
    patterns = (_NOISE_WORDS, *(card.noise_words for card in family_cards() if card.noise_words))
    found = next((match for words in patterns if (match := re.search(words, path.stem, re.I))), None)
    return None if found is None else {"h": "high", "l": "low"}[found[1][0].lower()]


def _check_pairs(opened: Sequence[OpenLora], files: ModelFiles) -> None:
    """Raises InvalidValueError for both files of a pair on a model with one transformer, and warns of half a pair."""
    named = [(lora, noise_of_name(lora.file.path)) for lora in opened]
    of_pairs = {noise: lora.file.path for lora, noise in named if noise is not None}
    if len(files.family.denoiser.transformers) == 1:
        if len(of_pairs) == 2:
            raise InvalidValueError(
                f"lora={of_pairs['high']} and {of_pairs['low']} are a pair for two transformers, of high and low "
                f"noise, and model {files.name} has one; use a LoRA made for {files.family.name}",
                field="lora",
            )
        return
    for noise, other in (NOISE, NOISE[::-1]):
        here = [lora for lora, said in named if lora.noise == said == noise and lora.strength]
        if here and not any(lora.noise in (other, "all") and lora.strength for lora in opened):
            logger.warning(
                "lora=%s is for %s noise, and nothing is given for %s noise; give the other file of the pair, too",
                here[0].file.path,
                noise,
                other,
                extra={"field": "lora"},
            )


def _open(lora: Lora, targets: Targets, files: ModelFiles) -> OpenLora:
    strength = lora.strength
    if isinstance(strength, bool) or not isinstance(strength, (int, float)) or not math.isfinite(strength):
        raise InvalidValueError(
            f"lora={lora.path} has strength {strength!r}, which is not a finite number; 1 takes it as it was trained",
            field="lora",
        )
    if lora.noise not in get_args(LoraNoise):
        raise InvalidValueError(
            f"lora={lora.path} is for noise {lora.noise!r}; choose from {', '.join(get_args(LoraNoise))}", field="lora"
        )
    has_pair = len(files.family.denoiser.transformers) > 1
    if lora.noise in NOISE and not has_pair:
        raise InvalidValueError(
            f"lora={lora.path} is for {lora.noise} noise, but model {files.name} has one transformer for all; leave "
            f"{lora.noise} out",
            field="lora",
        )
    file = LoraFile.open(lora.path)
    matched = file.match(targets)
    check_match(lora.path, file, matched, targets, files.name, files.family.name)
    if matched.text_keys:
        logger.warning(
            "lora=%s: its %d text encoder tensors are ignored; the text encoder stays as it is",
            lora.path,
            len(matched.text_keys),
            extra={"field": "lora"},
        )
    if matched.unknown_keys:
        logger.warning(
            "lora=%s: model %s has no place for %s; the rest is applied",
            lora.path,
            files.name,
            ", ".join(group_layers(matched.unknown_keys)),
            extra={"field": "lora"},
        )
    if matched.misfits:
        logger.warning(
            "lora=%s: %s not merged, whose shape in model %s is another; the rest is applied",
            lora.path,
            " and ".join(describe_misfits(matched)) + (" is" if len(matched.misfits) == 1 else " are"),
            files.name,
            extra={"field": "lora"},
        )
    noise = (noise_of_name(lora.path) if has_pair else None) or "all" if lora.noise == "auto" else lora.noise
    return OpenLora(file, float(strength), noise, _fingerprint(lora.path), matched)


def check_match(path: Path, file: LoraFile, matched: LoraMatch, targets: Targets, model: str, family: str) -> None:
    """Raises InvalidValueError for a file that was made for another model: fewer of its modules fit than do not. Fewer
    that do not are a warning, and the rest is applied."""
    if not matched.factors and not matched.misfits:
        raise InvalidValueError(
            f"lora={path} fits nothing in model {model}, it holds {join_names(file.checkpoint.tensors, 3)}; "
            f"expected keys such as {' or '.join(targets.examples)}: use a LoRA made for {family}",
            field="lora",
        )
    if matched.misfits and (replaced := next((key for key in matched.unknown_keys if targets.find(key)), None)):
        raise InvalidValueError(
            f"lora={path} is a control LoRA: it replaces {replaced}, and widens "
            f"{describe_misfits(matched)[0]}, for an image beside the latents; use a plain LoRA",
            field="lora",
        )
    if matched.known_modules >= matched.unknown_modules + matched.misfit_modules:
        return
    if matched.misfit_modules > matched.unknown_modules:
        name, found = next(iter(matched.misfits.items()))
        raise InvalidValueError(
            f"lora={path} changes {name} by a tensor of shape {found.product_shape}, and in model {model} it "
            f"has shape {found.shape}: use a LoRA made for this size of {family}",
            field="lora",
        )
    # Widths are the same in some families, and so are a few names: Flux.1's double blocks are those of Flux.2 klein 4B.
    raise InvalidValueError(
        f"lora={path} was made for another model: {model} has a place for {matched.known_modules} of its "
        f"{matched.modules} modules, and not for {join_names(matched.unknown_keys, 3)}; use a LoRA made for {family}",
        field="lora",
    )


def describe_misfits(matched: LoraMatch) -> list[str]:
    """The weights that are not merged, with the file's shape and the model's; those of all layers as one."""
    return group_layers(
        [f"{name} {each.product_shape} instead of {each.shape}" for name, each in matched.misfits.items()]
    )


def group_layers(keys: list[str]) -> list[str]:
    """The keys, with those that differ only in the layer number joined into one."""
    alike: dict[str, list[str]] = {}
    for key in keys:
        alike.setdefault(re.sub(r"(?<=[._])\d+(?=[._])", "*", key), []).append(key)
    return [f"{pattern} ({len(each)})" if len(each) > 1 else each[0] for pattern, each in alike.items()]


def _fingerprint(path: Path) -> str:
    digest = hashlib.sha256()
    digest_tensors(path, digest)
    return digest.hexdigest()[:16]
