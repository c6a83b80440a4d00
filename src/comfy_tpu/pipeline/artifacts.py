"""The files between the stages: safetensors whose metadata describe how they were made.

    text        positive.NAME for each name of the family's embeddings, [1, …]; negative.NAME, absent
                without guidance; shared.NAME of the given images
    latents     latents [videos, channels, frames, height, width], float32

The file's metadata carry the stage, the format, the model and its fingerprint, the LoRAs in it, the prompt and all
settings, so that the next stage needs nothing else and refuses what another model made.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save

import comfy_tpu
from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import CheckpointError, InvalidValueError
from comfy_tpu.families.card import ModelCard
from comfy_tpu.families.settings import guidance_scales
from comfy_tpu.json_input import parse_json
from comfy_tpu.pipeline import atomic
from comfy_tpu.pipeline.embeddings import PromptEmbeddings
from comfy_tpu.pipeline.initial import INITIAL
from comfy_tpu.pipeline.model_files import find_local, is_hub_id
from comfy_tpu.pipeline.stage_messages import FORMAT
from comfy_tpu.safetensors_input import SAFETENSORS_ERRORS

Stage = Literal["text", "latents"]

SUFFIX = ".safetensors"
MAKER: Mapping[str, str] = {"text": "encode", "latents": "denoise"}
"""The command that makes the artifact of a stage."""
MAKER_INPUT: Mapping[str, str] = {"text": "PROMPT", "latents": "TEXT"}
"""The argument of that command."""


class Model(Protocol):
    @property
    def model_name(self) -> str: ...

    @property
    def model_fingerprint(self) -> str: ...

    @property
    def dtype_name(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Header:
    """The metadata of an artifact."""

    stage: Stage
    prompt: str
    cut: str
    """The end of the prompt that exceeded the model's token limit."""
    settings: GenerationSettings
    model_name: str
    model_fingerprint: str
    images_fingerprint: str = ""
    """The fingerprint of the given images; empty without images."""
    loras: str = ""
    """JSON with name, fingerprint and strength of each LoRA; empty without LoRAs."""
    attention_window: str = ""
    """The attention window as text; empty where every token attended to all."""
    quantization: str = ""
    """What the transformer computed in 8 bits; empty: nothing."""
    preset: str = ""
    """The name of the preset whose settings these are; empty: none."""
    second_pass: str = ""
    """JSON of what the denoising started from, where it is latents of an earlier one; empty: it is not."""


def describe(
    prompt: str,
    settings: GenerationSettings,
    model: Model,
    *,
    images_fingerprint: str = "",
    loras: str = "",
    attention_window: str = "",
    quantization: str = "",
    preset: str = "",
    tiny_vae: str = "",
    second_pass: str = "",
    interpolation: str = "",
) -> dict[str, str]:
    """The metadata of an artifact or a video. `tiny_vae`: the fingerprint of the decoder of its frames, where it is not
    the VAE's; `interpolation`: that of the network that made frames between them. Bytes of a name that are not UTF-8
    become question marks."""
    optional = {
        "pictures": images_fingerprint,
        "loras": loras,
        "attention_window": attention_window,
        "quantize": quantization,
        "preset": preset,
        "tiny_vae": tiny_vae,
        "second_pass": second_pass,
        "interpolation": interpolation,
    }
    description = {
        "prompt": prompt,
        "seed": str(settings.seed),
        "settings": json.dumps(dataclasses.asdict(settings), ensure_ascii=False),
        "model": model.model_name,
        "model_fingerprint": model.model_fingerprint,
        "dtype": model.dtype_name,
        "comfy_tpu": comfy_tpu.__version__,
        **{name: value for name, value in optional.items() if value},
    }
    return {name: value.encode("utf-8", "replace").decode() for name, value in description.items()}


def is_same(found: Mapping[str, str], expected: Mapping[str, str]) -> bool:
    """Whether two outputs have the same prompt, images, model, LoRAs, settings, precisions, attention window, decoder,
    second pass and interpolation.

    Their contents are then equal up to the order of sums, which depends on the mesh.
    """
    keys = (
        *("prompt", "pictures", "settings", "model_fingerprint", "dtype", "loras", "attention_window", "quantize"),
        *("tiny_vae", "second_pass", "interpolation"),
    )
    return all(found.get(key) == expected.get(key) for key in keys)


def save_text(
    path: Path, embeddings: PromptEmbeddings, settings: GenerationSettings, model: Model, *, preset: str = ""
) -> None:
    branches = {
        "positive": embeddings.positive,
        "negative": embeddings.negative or {},
        "shared": embeddings.shared,
    }
    tensors = {f"{branch}.{name}": tensor for branch, named in branches.items() for name, tensor in named.items()}
    _save(
        path,
        "text",
        tensors,
        describe(embeddings.prompt, settings, model, images_fingerprint=embeddings.images_fingerprint, preset=preset),
        embeddings.cut,
    )


def load_text(path: Path, model: Model) -> tuple[PromptEmbeddings, Header]:
    header, tensors = _load(path, "text", model)
    branches: dict[str, dict[str, torch.Tensor]] = {"positive": {}, "negative": {}, "shared": {}}
    for full, tensor in tensors.items():
        branch, _, name = full.partition(".")
        if branch not in branches or not name or tensor.ndim < 2 or tensor.shape[0] != 1:
            raise _damaged_error(path, f"{full} has shape {list(tensor.shape)}", "encode")
        branches[branch][name] = tensor
    if not branches["positive"]:
        raise _damaged_error(path, "positive is missing", "encode")
    embeddings = PromptEmbeddings(
        header.prompt,
        branches["positive"],
        branches["negative"] or None,
        header.cut,
        branches["shared"],
        header.images_fingerprint,
    )
    return embeddings, header


def check_guidance(path: Path, embeddings: PromptEmbeddings, settings: GenerationSettings, card: ModelCard) -> None:
    largest = max(guidance_scales(settings))
    if card.is_guided(largest) and embeddings.negative is None:
        raise InvalidValueError(
            f"guidance_scale={largest} needs the negative prompt, and {path} was encoded without "
            f"guidance; run `comfy-tpu encode` again with --guidance-scale {largest}",
            field="guidance_scale",
        )


def check_seed(
    path: Path, embeddings: PromptEmbeddings, encoded: GenerationSettings, settings: GenerationSettings, card: ModelCard
) -> None:
    """Raises InvalidValueError for another seed than an image to start from was sampled with."""
    if INITIAL in embeddings.shared and card.starts_from_image and settings.seed != encoded.seed:
        raise InvalidValueError(
            f"seed={settings.seed} is not that of {path}, whose image was encoded with seed={encoded.seed}; leave it "
            "out, or run `comfy-tpu encode` again with it",
            field="seed",
        )


def save_latents(
    path: Path,
    latents: torch.Tensor,
    prompt: str,
    settings: GenerationSettings,
    model: Model,
    *,
    cut: str = "",
    **made_from: str,
) -> None:
    """`made_from`: as in `describe`."""
    _save(path, "latents", {"latents": latents}, describe(prompt, settings, model, **made_from), cut)


def load_latents(path: Path, model: Model) -> tuple[torch.Tensor, Header]:
    header, tensors = _load(path, "latents", model)
    if "latents" not in tensors:
        raise _damaged_error(path, "latents is missing", "denoise")
    if tensors["latents"].ndim != 5:
        raise _damaged_error(path, f"latents has shape {list(tensors['latents'].shape)}", "denoise")
    return tensors["latents"], header


def read_header(path: Path, stage: Stage) -> Header:
    return _parse(path, read_metadata(path, stage), stage)


def find_model(path: Path, header: Header) -> Path:
    """The directory of the model that the artifact at `path` names. Nothing is downloaded because a file names it."""
    name = header.model_name
    directory = find_local(name)
    if directory is not None:
        return directory
    if is_hub_id(name):
        raise InvalidValueError(
            f"{path} was made with {name}, which is not on this machine; add --model {name} to download it"
        )
    raise InvalidValueError(
        f"{path} was made with {name}, and there is no such directory here; add --model and the model's directory"
    )


def read_metadata(path: Path, stage: Stage) -> dict[str, str]:
    """The metadata of an artifact of this stage; raises an error that describes any other file at `path`."""
    maker = MAKER[stage]
    if not path.exists():
        raise InvalidValueError(
            f"{path} does not exist; make it with `comfy-tpu {maker} {MAKER_INPUT[stage]} -o {path}`"
        )
    if path.is_dir():
        raise InvalidValueError(f"{path} is a directory; give the file that `comfy-tpu {maker}` made")
    if not path.is_file():  # the library would wait for the writer of a named pipe, deaf to signals
        raise InvalidValueError(f"{path} is not a file; give the one that `comfy-tpu {maker}` made")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata: dict[str, str] = file.metadata() or {}
    except SAFETENSORS_ERRORS as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors ({error}); it is truncated, damaged or of another format: "
            f"make it again with `comfy-tpu {maker}`"
        ) from error
    found = metadata.get("artifact")
    if found is None:
        raise InvalidValueError(
            f"{path} is a safetensors file but no artifact of comfy-tpu; expected what `comfy-tpu {maker}` makes"
        )
    if found != stage:
        made_by = f", made by `comfy-tpu {MAKER[found]}`" if found in MAKER else ""
        raise InvalidValueError(f"{path} holds {found}{made_by}; expected {stage}, made by `comfy-tpu {maker}`")
    if metadata.get("format") != str(FORMAT):
        raise InvalidValueError(
            f"{path} has format {metadata.get('format')}, written by comfy-tpu {metadata.get('comfy_tpu')}; this is "
            f"{comfy_tpu.__version__}, which reads format {FORMAT}: use one version for all stages"
        )
    return metadata


def _save(path: Path, stage: Stage, tensors: Mapping[str, torch.Tensor], description: dict[str, str], cut: str) -> None:
    metadata = {"artifact": stage, "format": str(FORMAT), "cut": cut, **description}
    # Through memory: the library's own writing to a file reports a full disk as text without an error number.
    content = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, metadata)
    with atomic.replacing(path) as partial, atomic.write_errors(path):
        partial.write_bytes(content)


def _load(path: Path, stage: Stage, model: Model) -> tuple[Header, dict[str, torch.Tensor]]:
    header = read_header(path, stage)
    maker = MAKER[stage]
    if header.model_fingerprint != model.model_fingerprint:
        made_with = f"{path} was made with model {header.model_name} ({header.model_fingerprint})"
        if header.model_name == model.model_name:
            raise InvalidValueError(
                f"{made_with}, whose files have changed since ({model.model_fingerprint}); run `comfy-tpu {maker}` "
                "again, or give the directory of the earlier files with --model"
            )
        raise InvalidValueError(
            f"{made_with}, this is {model.model_name} ({model.model_fingerprint}); run `comfy-tpu {maker}` again with "
            f"--model {model.model_name}, or go on with --model {header.model_name}"
        )
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            # Copies: a tensor that stays mapped to the file would change or crash with it.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except SAFETENSORS_ERRORS as error:
        raise _damaged_error(path, str(error), maker) from error
    return header, tensors


def _parse(path: Path, metadata: Mapping[str, str], stage: Stage) -> Header:
    known = {field.name for field in dataclasses.fields(GenerationSettings)}
    try:
        values: Any = parse_json(metadata["settings"])
        if not isinstance(values, dict):
            raise TypeError(f"settings are a {type(values).__name__}")
        if set(values) != known:
            raise ValueError(f"settings differ in {', '.join(sorted(set(values) ^ known))}")
        loras = metadata.get("loras", "")
        _check_loras(loras)
        return Header(
            stage,
            metadata["prompt"],
            metadata["cut"],
            GenerationSettings(**values),
            metadata["model"],
            metadata["model_fingerprint"],
            metadata.get("pictures", ""),
            loras,
            metadata.get("attention_window", ""),
            metadata.get("quantize", ""),
            metadata.get("preset", ""),
            metadata.get("second_pass", ""),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged_error(path, repr(error), MAKER[stage]) from error


def _check_loras(text: str) -> None:
    """Raises ValueError unless `text` is a JSON list of objects: the report at the end of a stage repeats them."""
    notes = parse_json(text) if text else []
    if not isinstance(notes, list) or not all(isinstance(note, dict) for note in notes):
        raise ValueError("loras are no list of objects")


def _damaged_error(path: Path, what: str, maker: str) -> CheckpointError:
    return CheckpointError(f"{path} is not as comfy-tpu writes it ({what}); make it again with `comfy-tpu {maker}`")
