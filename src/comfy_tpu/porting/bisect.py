"""The module at fault in a model whose compiled program differs from PyTorch.

PyTorch runs the model once for each level and records what its modules are given and return. Each module is then traced
and compiled by itself on those very inputs, so that no error comes from a module before it. The first that differs is
opened, until one differs whose own modules agree.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import torch

from comfy_tpu.bridge import TraceContext, build_skeleton, call_module, to_device, to_host, weight_shapes
from comfy_tpu.errors import CheckpointError, InvalidValueError, UnsupportedError
from comfy_tpu.porting.inputs import guess_inputs, parse_inputs
from comfy_tpu.porting.small_models import SmallModel, entry_method, make_small_model
from comfy_tpu.porting.targets import ANY_ERROR, Target, read_object
from comfy_tpu.porting.trial import ERROR_MAX, relative_error
from comfy_tpu.quiet import quiet

TOLERANCES = {"float32": ERROR_MAX, "bfloat16": 3e-2}
"""By dtype: norm of the difference by norm of PyTorch's result."""


@dataclasses.dataclass(frozen=True)
class ComparedCall:
    """One call of a module, compared with PyTorch on the same inputs."""

    path: str
    """Its name in the model; empty for the model itself."""
    class_name: str
    number: int
    """How often the module was called before, in one run of the model."""
    error: float
    """The largest of its results; infinite where shapes differ."""
    place: str
    """File and line of its class; empty where there is none."""
    failure: str = ""
    """Why it cannot be traced by itself."""


@dataclasses.dataclass(frozen=True)
class Bisection:
    target: str
    file: str
    dtype: str
    tolerance: float
    path: tuple[ComparedCall, ...]
    """From the model to the module at fault; only the model where that agrees."""
    compared: int
    """Module calls that were compared."""
    has_modules: bool
    """Whether the module at fault calls others, which then agree."""

    @property
    def culprit(self) -> ComparedCall | None:
        return self.path[-1] if _differs(self.path[0], self.tolerance) else None


@dataclasses.dataclass(frozen=True)
class _Call:
    """The inputs that PyTorch gave a module, and its results."""

    path: str
    number: int
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: list[torch.Tensor]


def bisect(
    target: Target,
    *,
    config: Mapping[str, Any] | None = None,
    inputs: Mapping[str, Any] | None = None,
    checkpoint: Path | None = None,
    dtype: str = "float32",
    tolerance: float | None = None,
) -> Bisection:
    """`checkpoint`: a directory with the weights of the model, instead of a small model with random ones."""
    if dtype not in TOLERANCES:
        raise InvalidValueError(f"dtype={dtype!r} is unknown; choose from {', '.join(TOLERANCES)}", field="dtype")
    limit = TOLERANCES[dtype] if tolerance is None else tolerance
    if not isinstance(limit, (int, float)) or not 0 < limit < 1:
        raise InvalidValueError(f"tolerance={limit} is not allowed; give a number between 0 and 1", field="tolerance")
    if checkpoint is None:
        model = make_small_model(target, config=config, inputs=inputs)
    else:
        model = open_model(target, checkpoint, config=config, inputs=inputs)
    compared, path, has_modules = _descend(_convert_model(model, getattr(torch, dtype)), limit)
    file = str(target.definition.module.path)
    return Bisection(target.name, file, dtype, limit, tuple(path), compared, has_modules)


def open_model(
    target: Target, directory: Path, *, config: Mapping[str, Any] | None, inputs: Mapping[str, Any] | None
) -> SmallModel:
    """The model of a directory with `config.json` and safetensors files, with its weights, in float32 on the host."""
    from safetensors.torch import load_file

    files = sorted(directory.glob("*.safetensors")) if directory.is_dir() else []
    if not files:
        raise InvalidValueError(
            f"checkpoint={directory} has no .safetensors files; give the directory of one model, such as "
            "MODEL/transformer",
            field="checkpoint",
        )
    cls = target.load()
    described = directory / "config.json"
    known = config if config is not None else read_object(described) if described.is_file() else target.config
    parameters = inspect.signature(cls).parameters
    chosen = {name: value for name, value in known.items() if name in parameters}
    try:
        with quiet():
            model = cls(**chosen).eval().float().requires_grad_(False)
            weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
            model.load_state_dict(weights)
    except ANY_ERROR as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"checkpoint={directory} cannot be loaded into {target.name} ({reason}); give the weights of that class",
            field="checkpoint",
        ) from error
    method = entry_method(cls)
    values = parse_inputs(inputs) if inputs is not None else guess_inputs(model, method)
    if "return_dict" in inspect.signature(getattr(model, method)).parameters:
        values["return_dict"] = False
    return SmallModel(model, build_skeleton(lambda: cls(**chosen)), method, values, chosen)


def _convert_model(small: SmallModel, dtype: torch.dtype) -> SmallModel:
    def convert(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return dataclasses.replace(small, model=small.model.to(dtype), inputs=jax.tree.map(convert, small.inputs))


def _descend(small: SmallModel, tolerance: float) -> tuple[int, list[ComparedCall], bool]:
    """The number of compared calls, the path to the module at fault, and whether that calls others."""
    whole, _ = _record(small, None)
    path = [_compare(small, whole)]
    if path[0].failure:
        raise UnsupportedError(f"{path[0].failure}; see what `comfy-tpu port check` says of it")
    compared = 1
    inside: list[_Call] = []
    current: _Call | None = whole
    while current is not None and _differs(path[-1], tolerance):
        _, inside = _record(small, None if current is whole else current)
        current = None
        for call in inside:
            result = _compare(small, call)
            compared += 1
            if _differs(result, tolerance):
                path.append(result)
                current = call
                break
    return compared, path, bool(inside)


def _differs(call: ComparedCall, tolerance: float) -> bool:
    return not call.error <= tolerance  # NaN differs


def _record(small: SmallModel, opened: _Call | None) -> tuple[_Call, list[_Call]]:
    """Runs PyTorch. The call of the whole model, and the calls that were made directly inside `opened`, in the order
    in which they returned; None: inside the model itself."""
    names = {module: name for name, module in small.model.named_modules() if name}
    counts: Counter[str] = Counter()
    stack: list[tuple[str, int]] = []
    given: list[tuple[tuple[Any, ...], dict[str, Any]] | None] = []
    found: list[_Call] = []
    place = [] if opened is None else [(opened.path, opened.number)]

    def enter(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        wanted = stack[-1:] == place
        name = names[module]
        stack.append((name, counts[name]))
        counts[name] += 1
        given.append(_snapshot((args, kwargs)) if wanted else None)

    def leave(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        (name, number), inputs = stack.pop(), given.pop()
        if inputs is not None:
            found.append(_Call(name, number, *inputs, _tensors_in(output)))

    with torch.no_grad(), quiet(), _forward_hooks(names, enter, leave):
        inputs = _snapshot(small.inputs)
        try:
            result = getattr(small.model, small.method)(**inputs)
        except ANY_ERROR as error:
            raise UnsupportedError(
                f"PyTorch itself does not run it here ({type(error).__name__}: {error}); give --config and --inputs "
                "that it accepts"
            ) from error
    return _Call("", 0, (), _snapshot(small.inputs), _tensors_in(result)), found


@contextlib.contextmanager
def _forward_hooks(
    names: Mapping[torch.nn.Module, str], enter: Callable[..., None], leave: Callable[..., None]
) -> Iterator[None]:
    handles = []
    for module in names:
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _snapshot(tree: Any) -> Any:
    """Copies of the tensors, in containers of their own: a module may write into either."""
    return jax.tree.map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, tree)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """Also of the outputs of diffusers and transformers, which are mappings of their own."""
    if isinstance(value, torch.Tensor):
        return [value.clone()]
    if isinstance(value, Mapping):
        value = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return [tensor for each in value for tensor in _tensors_in(each)] if isinstance(value, (list, tuple)) else []


def _compare(small: SmallModel, call: _Call) -> ComparedCall:
    module, skeleton = (each.get_submodule(call.path) for each in (small.model, small.skeleton))
    method = small.method if not call.path else "forward"
    error, failure = 0.0, ""
    if call.results:
        try:
            error = _error(_run_compiled(module, skeleton, method, call), call.results)
        except ANY_ERROR as failed:
            error, failure = float("inf"), f"{type(module).__name__} cannot be traced by itself ({_first_line(failed)})"
    return ComparedCall(call.path, type(module).__name__, call.number, error, _place(type(module)), failure)


def _run_compiled(module: torch.nn.Module, skeleton: torch.nn.Module, method: str, call: _Call) -> list[torch.Tensor]:
    """The results of the compiled module for the inputs of the call."""
    state = module.state_dict(keep_vars=True)
    weights = {name: state[name].detach() for name in weight_shapes(skeleton)}
    leaves, structure = jax.tree.flatten(_snapshot((call.args, dict(call.kwargs))))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def run(weights: Mapping[str, Any], arrays: list[Any]) -> Any:
        given = iter(arrays)
        rebuilt = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = jax.tree.unflatten(structure, rebuilt)

        def flat(traced: torch.nn.Module, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
            return _tensors_in(
                getattr(traced, method)(*args, **kwargs) if method != "forward" else traced(*args, **kwargs)
            )

        return call_module(skeleton, weights, args, kwargs, context=TraceContext(), method=flat)

    with quiet():
        results: list[torch.Tensor] = to_host(jax.jit(run)(to_device(weights), to_device(tensors)))
    return results


def _error(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    if [tuple(each.shape) for each in actual] != [tuple(each.shape) for each in expected]:
        return float("inf")
    errors = [relative_error(*pair) for pair in zip(actual, expected, strict=True) if pair[1].numel()]
    return max((float("inf") if error != error else error for error in errors), default=0.0)


def _place(cls: type) -> str:
    try:
        return f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):
        return ""


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def format_json(bisections: list[Bisection]) -> str:
    """One object: schema, differs, and for each model its target, file, dtype, tolerance, compared, path and culprit
    (path, class_name, number, error or null where shapes or traces differ, place, failure)."""

    def describe(call: ComparedCall) -> dict[str, Any]:
        error = call.error if call.error != float("inf") else None
        return {**dataclasses.asdict(call), "error": error}

    models = [
        {
            **{name: getattr(each, name) for name in ("target", "file", "dtype", "tolerance", "compared")},
            "path": [describe(call) for call in each.path],
            "culprit": describe(each.culprit) if each.culprit else None,
        }
        for each in bisections
    ]
    return json.dumps({"schema": 1, "differs": any(each.culprit for each in bisections), "models": models}, indent=2)


def format_text(bisections: list[Bisection]) -> str:
    return "\n\n".join("\n".join(_lines(each)) for each in bisections)


def _lines(found: Bisection) -> list[str]:
    lines = [f"{found.target}  {found.file}", f"{found.dtype}, tolerance {found.tolerance:g}", ""]
    rows = [("module", "class", "call", "error")]
    for call in found.path:
        error = "not traced" if call.failure else "other shapes" if call.error == float("inf") else f"{call.error:.1e}"
        rows.append((call.path or "(the model)", call.class_name, str(call.number + 1), error))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines += [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows
    ]
    lines.append("")
    culprit = found.culprit
    if culprit is None:
        return [*lines, "It agrees with PyTorch."]
    name = f"{culprit.path or 'the model itself'} ({culprit.class_name})"
    where = f" at {culprit.place}" if culprit.place else ""
    cause = (
        "the modules that it calls agree, so its own code does it"
        if found.has_modules
        else "it calls no other module, so its operators do it"
    )
    lines.append(f"The first that differs is {name}{where}: {cause}.")
    if culprit.failure:
        lines.append(f"{culprit.failure}.")
    lines.append(f"{found.compared} module calls were compared, each on the inputs that PyTorch gave it.")
    return lines
