"""Checks of the configurations that modules are built from."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import inspect
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from comfy_tpu.distribution import HOME_PAGE, pip_command
from comfy_tpu.errors import CheckpointError, UnsupportedError, config_errors, import_error
from comfy_tpu.families.shared.published import NO_EFFECT, SUBPACKAGES
from comfy_tpu.quiet import quiet

_CONVERTED = {"torch_dtype", "rope_scaling", "rope_theta", "rope_local_base_freq", "sliding_window_pattern"}
"""Keys of older versions of transformers that newer ones read and rename."""
_NO_EFFECT_ON_ENCODERS = {
    "dropout": "training; CLIP reads attention_dropout",
    "gradient_checkpointing": "training",
    "in_chans": "a copy of in_channels in Qwen2.5-VL",
    "output_past": "generation",
    "scalable_attention": "a switch of UMT5's training code",
    "spatial_patch_size": "a copy of patch_size in Qwen2.5-VL",
    "tokenizer_class": "the tokenizer has a configuration of its own",
    "vision_use_head": "the pooling of SigLIP inside Gemma 3, whose language model is used alone",
}
"""Keys of published text and image encoders that no module of transformers reads -> what they are about. Names of
tokens, which end in _token_id, are for generation."""


def clean_config(
    config: Mapping[str, Any], class_name: str, path: str | Path, ignored: Collection[str] = ()
) -> dict[str, Any]:
    """The configuration of a class of diffusers or transformers without `ignored` keys and those without effect.

    Raises UnsupportedError for other unknown keys and CheckpointError for values of a wrong type: diffusers would log
    the keys, and build another module than the trained one, and a string in place of a number would fail in the middle
    of a run. A class of neither library is not checked.
    """
    kept = {name: value for name, value in config.items() if name not in ignored}
    kept = {name: value for name, value in kept.items() if (class_name, name) not in NO_EFFECT}
    if (kind := kept.get("model_type") or _find_model_type(class_name)) is not None:
        _check_encoder(kept, kind, path, ignored)
    elif (model_class := _find_class(class_name)) is not None:
        unknown = _strip_private(set(kept)) - set(inspect.signature(model_class).parameters)
        _refuse_keys(unknown, class_name, "diffusers", path)
        _check_types(model_class, kept)
    return kept


def _find_class(name: str) -> type | None:
    import diffusers
    from diffusers.configuration_utils import ConfigMixin

    for library in (diffusers, *map(importlib.import_module, SUBPACKAGES)):
        found = _import_name(library, name)
        if isinstance(found, type) and issubclass(found, ConfigMixin):
            return found
    return None


def _find_model_type(class_name: str) -> str | None:
    """The model_type of a class of transformers; None for any other class."""
    import transformers

    config_class = getattr(_import_name(transformers, class_name), "config_class", None)
    return getattr(config_class, "model_type", None)


def _import_name(library: types.ModuleType, name: str) -> Any:
    try:
        return getattr(library, name, None)
    except (ImportError, RuntimeError) as error:  # the library imports lazily
        raise import_error(f"{name} of {library.__name__}", error) from error


def check_absent(config: Mapping[str, Any], published: Mapping[str, Any], path: str | Path) -> None:
    """Raises CheckpointError for a key of the published configuration that a file lacks, and for which the class of
    diffusers has another default."""
    model_class = _find_class(str(published.get("_class_name")))
    if model_class is None:
        return
    parameters = inspect.signature(model_class).parameters
    defaults = {name: _plain(parameters[name].default) for name in set(parameters) & set(published) - set(config)}
    if absent := sorted(name for name, default in defaults.items() if default != _plain(published[name])):
        raise CheckpointError(
            f"{path} lacks {', '.join(absent)}, without which {model_class.__name__} of {_installed('diffusers')} is "
            "not the published model; download the model again",
            field="model",
        )


def _plain(value: Any) -> Any:
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def check_scheduler(config: Mapping[str, Any], path: str | Path, ignored: Collection[str] = ()) -> None:
    """Raises UnsupportedError for a scheduler that diffusers does not know, and as `clean_config` does. An absent file,
    whose configuration is empty, passes."""
    import diffusers

    name = config.get("_class_name")
    if config and "_class_name" not in ignored:
        scheduler_class = _find_class(str(name))
        if scheduler_class is None or not issubclass(scheduler_class, diffusers.SchedulerMixin):
            raise UnsupportedError(
                f"{path} has _class_name={name!r}, expected a scheduler that {_installed('diffusers')} knows; "
                f"{_upgrade('diffusers')}, or {_ignore(('_class_name',))}",
                field="model",
            )
        clean_config(config, str(name), path, ignored)


def _strip_private(names: Collection[str]) -> set[str]:
    """Without the keys that libraries write about themselves: `_diffusers_version`."""
    return {name for name in names if not name.startswith("_")}


def _ignore(names: Collection[str]) -> str:
    flags = " ".join(f"--ignore-config-key {name}" for name in names)
    return f"add {flags} to go on without (in ComfyUI, ignore_config_keys of TPU Options)"


def _refuse_keys(unknown: Collection[str], owner: str, library: str, path: str | Path) -> None:
    if unknown:
        raise UnsupportedError(
            f"{path} has {', '.join(sorted(unknown))}, which {owner} of {_installed(library)} does not know, and "
            f"without which it may be another model; {_upgrade(library)}, or {_ignore(sorted(unknown))}",
            field="model",
        )


def _installed(library: str) -> str:
    return f"{library} {importlib.metadata.version(library)}"


def _upgrade(library: str) -> str:
    return f"upgrade: {pip_command('install', '--upgrade', library)}"


def _check_encoder(config: Mapping[str, Any], kind: str, path: str | Path, ignored: Collection[str]) -> None:
    from transformers import CONFIG_MAPPING, GenerationConfig

    if kind not in CONFIG_MAPPING:
        raise UnsupportedError(
            f"{path} has model_type={kind!r}, which {_installed('transformers')} does not know; "
            f"{_upgrade('transformers')}",
            field="model",
        )
    common = {*GenerationConfig().to_dict(), *_CONVERTED, *_NO_EFFECT_ON_ENCODERS, *ignored}
    config_class = CONFIG_MAPPING[kind]
    parts = {name: _encoder_keys(type(getattr(config_class(), name))) for name in config_class.sub_configs}
    # Configurations that older versions wrote have the keys of the language model outside, too.
    for owner, keys, known in (
        (config_class.__name__, config, _encoder_keys(config_class).union(*parts.values())),
        *((name, config[name], parts[name]) for name in parts if isinstance(config.get(name), Mapping)),
    ):
        unknown = {name for name in _strip_private(set(keys)) - known - common if not name.endswith("_token_id")}
        _refuse_keys(unknown, owner, "transformers", path)
    with config_errors(str(path)), quiet():
        config_class(**copy.deepcopy(dict(config)))  # checks the types


def _encoder_keys(config_class: Any) -> set[str]:
    return {*inspect.signature(config_class).parameters, *config_class().to_dict(), *config_class.attribute_map}


def check_tokenizer(config: Mapping[str, Any], path: str | Path) -> None:
    """Raises UnsupportedError for a tokenizer that transformers would replace by another one."""
    import transformers

    name = config.get("tokenizer_class")
    if name is not None and not any(hasattr(transformers, f"{name}{suffix}") for suffix in ("", "Fast")):
        raise UnsupportedError(
            f"{path} names the tokenizer {name}, which {_installed('transformers')} does not know; "
            f"{_upgrade('transformers')}",
            field="model",
        )


_INDEX_KEYS = {"boundary_ratio": float | None, "expand_timesteps": bool | None, "is_distilled": bool | None}
"""Values of model_index.json that cards read -> their types."""
_INDEX_PARTS = ("transformer", "text_encoder", "image_encoder", "vae", "connectors")
"""Beginnings of the names of components that change a result."""


def check_index(
    index: Mapping[str, Any], components: Collection[str], path: str | Path, ignored: Collection[str] = ()
) -> None:
    """Raises UnsupportedError for a value or a component in model_index.json that the family does not read, and
    CheckpointError for a value of a wrong type.

    Components with other names than _INDEX_PARTS are optional: safety checkers, upsamplers, prompt enhancers.
    """
    for name, hint in _INDEX_KEYS.items():
        if not _matches_hint(index.get(name), hint):
            expected = "a number" if hint == float | None else "true or false"
            raise CheckpointError(
                f"{path} has {name}={repr(index[name])[:60]}, expected {expected}; download the model again",
                field="model",
            )
    known = {*_INDEX_KEYS, *components, *ignored}
    unknown = [
        name
        for name, value in index.items()
        if name not in known and not name.startswith("_") and value not in (None, False, [None, None])
        if not isinstance(value, list) or len(value) != 2 or name.startswith(_INDEX_PARTS)
    ]
    if unknown:
        raise UnsupportedError(
            f"{path} has {', '.join(unknown)}, which comfy-tpu does not read for a {index.get('_class_name')}, and "
            f"without which it may be another model; install a newer comfy-tpu ({HOME_PAGE}), or {_ignore(unknown)}",
            field="model",
        )


def _check_types(model_class: type, config: Mapping[str, Any]) -> None:
    try:
        hints = typing.get_type_hints(inspect.unwrap(model_class.__init__))  # type: ignore[misc]
    except NameError:  # names that only type checkers import
        return
    parameters = inspect.signature(model_class).parameters
    for name in set(hints) & set(config) & set(parameters):
        value, default = config[name], parameters[name].default
        if hints[name] == bool | None and default is None:  # diffusers' annotation of shift_terminal, a number
            continue
        # Some defaults are not of the kind that their annotation says: None where it says float.
        usual = _matches_hint(default, hints[name]) or _json_kind(default) != _json_kind(value)
        if usual and not _matches_hint(value, hints[name]):
            raise CheckpointError(
                f"the configuration of {model_class.__name__} has {name}={repr(value)[:60]}, expected a value such as "
                f"{repr(default)[:60]}; download the model again"
            )


def _matches_hint(value: Any, hint: Any) -> bool:
    """Whether a JSON value matches a type annotation, nested values included.

    Lengths of lists are not checked, and 1 matches float: annotations are not exact about them.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_matches_hint(value, each) for each in arguments)
    if origin in (list, tuple):
        inner = [each for each in arguments if each is not Ellipsis]
        if not isinstance(value, (list, tuple)):
            return False
        return not inner or all(any(_matches_hint(each, kind) for kind in inner) for each in value)
    if origin is typing.Literal:
        return value in arguments
    kinds = {int: "number", float: "number", bool: "bool", str: "text", types.NoneType: "null", dict: "object"}
    return hint not in kinds or kinds[hint] == _json_kind(value)


def _json_kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "bool"
    kinds = {int | float: "number", str: "text", list | tuple: "list", Mapping: "object"}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), type(value).__name__)


def check_sizes(config: Mapping[str, Any], published: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a size that is no whole number from 1, or not as many as a published model has."""
    for name, usual in published.items():
        given = config.get(name, usual)
        if _is_size(usual) and not _is_size(given):
            raise _damaged_error(name, given, "a whole number")
        if isinstance(usual, (list, tuple)) and all(map(_is_size, usual)):
            fits = isinstance(given, (list, tuple)) and len(given) == len(usual) and all(map(_is_size, given))
            if not fits:
                raise _damaged_error(name, given, f"{len(usual)} whole numbers")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _damaged_error(name: str, given: object, expected: str) -> CheckpointError:
    return CheckpointError(
        f"the config.json of the transformer has {name}={repr(given)[:60]}, expected {expected}; download the model "
        "again"
    )
