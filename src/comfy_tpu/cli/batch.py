"""comfy-tpu batch: makes a video of every line of a file, and goes on where it was interrupted.

With --json, one object a line on stdout, by its "event":

    submitted   total, done
    refused     line, reason
    progress    worker, stage, what, done, total
    done        id, line, outputs, seconds, cut, resumed_after
    failed      id, line, output, error; attempts are left unless final; of_model: all jobs of its model fail so
    message     text
    summary     done, failed, refused, open, seconds
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from comfy_tpu.cli import generate, options
from comfy_tpu.cli.batch_display import Display, JsonDisplay
from comfy_tpu.cli.hosts import add_hosts
from comfy_tpu.cli.ray_options import add_ray, make_ray_config
from comfy_tpu.config import FAST, FastSettings
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.settings import check_checkpoint_every
from comfy_tpu.jobs.driver import Batch, FindModel, ModelFacts, Workers
from comfy_tpu.jobs.folder import Folder
from comfy_tpu.jobs.ledger import Ledger
from comfy_tpu.jobs.ray_workers import RayConfig, RayWorkers
from comfy_tpu.jobs.request import Request
from comfy_tpu.jobs.sources import FORMATS, open_jobs
from comfy_tpu.parallel import hosts

if TYPE_CHECKING:
    from comfy_tpu.jobs.local_worker import LocalWorker

_OF_THE_RUN = (
    *("json", "verbose", "profile", "dump", "help", "preview"),
    *("coordinator", "num_processes", "process_id", "hosts_timeout"),
)
"""Flags of `generate` that concern a process, not a video."""
_REFUSED_KEYS = {
    **dict.fromkeys(_OF_THE_RUN, " is of the whole batch"),
    "checkpoint_every": " is of the whole batch, as the flag --checkpoint-every",
}
"""Flags of `generate` that are no keys of a line, with the reasons."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "jobs",
        metavar="JOBS",
        help='a job a line: JSON such as {"prompt": "…", "seed": 7} with any flag of `generate` as a key, CSV with '
        "such names in its first line, or prompts; - for standard input; also an address, gs://bucket/jobs.jsonl",
    )
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        type=options.path_parser("--output", str),
        metavar="DIR",
        help="the directory of the videos, or an address such as gs://bucket/videos; started again with the same one, "
        "a batch goes on where it was",
    )
    parser.add_argument("--format", metavar="NAME", help=f"of JOBS: {', '.join(FORMATS)} (default: by its name)")
    parser.add_argument(
        "--batch-size",
        default="auto",
        metavar="N",
        help="the most prompts that share a step: auto, as many as keep the devices busy and fit; or a number",
    )
    options.add_checkpoint(
        parser,
        "save the steps of the running job every N steps, and on SIGTERM, in the output's directory; started again, "
        "the batch goes on inside the job; prompts then share no steps",
    )
    add_ray(parser)
    parser.add_argument("--json", action="store_true", help="print what happens as JSON lines")
    options.add_images(parser, kind=str)
    options.add_videos(parser, kind=str)
    options.add_strength(parser)
    options.add_settings(parser)
    options.add_second_pass(parser)
    options.add_interpolation(parser)
    options.add_model(parser, default="demo")
    options.add_vae_backend(parser)
    options.add_attention(parser)
    options.add_loras(parser, kind=str)
    parser.add_argument("--verbose", action="store_true", help="also say how weights are split, and what is evicted")
    add_hosts(parser)
    parser.set_defaults(sends_inputs=False)  # files are those of lines, and may be addresses: jobs/inputs.py


def run(arguments: argparse.Namespace) -> int:
    if not hosts.is_first_host():
        return _follow(arguments)
    started = time.monotonic()
    batch_size = _choose_batch_size(arguments)
    ray = make_ray_config(arguments)
    every: int | None = arguments.checkpoint_every
    parse = functools.partial(parse_values, common=_common_values(arguments))
    folder = Folder(arguments.output)
    with open_jobs(arguments.jobs, arguments.format) as lines:
        folder.prepare()
        with contextlib.closing(Ledger(folder.ledger_path)) as ledger:
            with _open_display(arguments) as display:
                batch = Batch(folder, ledger, display, saves_steps=every is not None)
                batch.restore()
                with (
                    hosts.cleaning_up(batch.write_results),
                    _open_workers(ray, folder, batch_size, every, display) as (workers, find_model),
                ):
                    batch.submit(lines, parse, find_model)
                    try:
                        counts = batch.run(workers)
                    finally:
                        batch.write_results()
            display.summary(counts, batch.refusals, time.monotonic() - started)
    is_complete = counts.done == counts.total and not batch.refusals
    return int(hosts.first_host_value(lambda: 0 if is_complete else 1))


def _follow(arguments: argparse.Namespace) -> int:
    """Takes part in the first host's jobs, and ends with its status."""
    from comfy_tpu.jobs.local_worker import follow

    every = arguments.checkpoint_every
    follow(Folder(arguments.output), batch_size=_choose_batch_size(arguments), checkpoint_every=every)
    return int(hosts.first_host_value(lambda: None))


@contextlib.contextmanager
def _open_workers(
    ray: RayConfig | None,
    folder: Folder,
    batch_size: int | None,
    checkpoint_every: int | None,
    display: Display | JsonDisplay,
) -> Iterator[tuple[Workers, FindModel]]:
    workers: LocalWorker | RayWorkers
    chosen: dict[str, Any] = {"batch_size": batch_size, "checkpoint_every": checkpoint_every}
    if ray is None:
        from comfy_tpu.jobs.local_worker import LocalWorker, find_model_facts

        workers, find_facts = LocalWorker(folder, **chosen), find_model_facts
    else:
        workers = RayWorkers(folder, ray, **chosen, report=display.message)
        find_facts = workers.find_model_facts

    @functools.cache
    def find(model: str) -> ModelFacts:
        return find_facts(Request(json.loads(model)))

    try:
        yield workers, lambda request: find(_model_values(request))
    except BaseException:
        workers.cancel()
        raise
    finally:
        workers.close()


def _model_values(request: Request) -> str:
    names = ("model", "transformer", "text_encoder", "vae", "image_encoder")
    return json.dumps({name: request.values[name] for name in names if name in request.values}, sort_keys=True)


def _open_display(arguments: argparse.Namespace) -> Display | JsonDisplay:
    return JsonDisplay() if arguments.json else Display()


def _choose_batch_size(arguments: argparse.Namespace) -> int | None:
    """1 where the steps of jobs are saved: each goes on by itself."""
    size, every = _parse_batch_size(arguments.batch_size), arguments.checkpoint_every
    if every is None:
        return size
    check_checkpoint_every(every)
    if size not in (None, 1):
        raise InvalidValueError(
            f"checkpoint_every={every} saves the steps of one job at a time, and batch_size={size} has jobs share "
            "theirs; leave one of them out",
            field="checkpoint_every",
        )
    return 1


def _parse_batch_size(text: str) -> int | None:
    if text == "auto":
        return None
    with contextlib.suppress(ValueError):
        if 1 <= int(text) <= 64:
            return int(text)
    raise InvalidValueError(f"batch_size={text} is neither auto nor a number from 1 to 64", field="batch_size")


@dataclasses.dataclass(frozen=True)
class _Key:
    """A key of a line: a flag of `generate`."""

    field: str
    convert: Callable[[Any], Any]
    is_list: bool
    is_preset: bool


@functools.cache
def _keys() -> Mapping[str, _Key]:
    """The keys by every name that the flags of `generate` have, with - and with _."""
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    keys: dict[str, _Key] = {}
    for action in parser._actions:
        if action.dest in _REFUSED_KEYS:
            continue
        names = [action.dest, *(flag.lstrip("-") for flag in action.option_strings if flag.startswith("--"))]
        is_list = isinstance(action, argparse._AppendAction)
        convert = _number if action.dest in _NUMBERS else _text
        for name in names:
            keys[name.replace("-", "_")] = _Key(action.dest, convert, is_list, isinstance(action.const, FastSettings))
    return keys


def parse_values(values: Mapping[str, Any], common: Mapping[str, Any]) -> Request:
    """The request of a line. `common`: the values of the command line, which hold where a line has none."""
    parsed = dict(common)
    for name, value in values.items():
        key = _keys().get(name.strip().replace("-", "_"))
        if key is None:
            hint = _REFUSED_KEYS.get(name.strip().replace("-", "_"), " is no flag of `comfy-tpu generate`")
            raise InvalidValueError(f"{name}{hint}; leave it out", field=name)
        if value is None:
            continue
        given = value if key.is_list and isinstance(value, list) else [value]
        converted = [_checked(key, name, each) for each in given]
        parsed[key.field] = converted if key.is_list else converted[0]
        if parsed[key.field] is None:
            del parsed[key.field]
    if parsed.get("vae") == [options.TINY]:  # as on a command line
        parsed["vae_backend"] = parsed.pop("vae")[0]
    if "fast" not in parsed and parsed.get("quantize") == "none":
        del parsed["quantize"]  # the default: with or without it, the same job
    prompt = parsed.get("prompt", "")
    options.check_texts(prompt, parsed.get("negative_prompt"))
    if not prompt.strip():
        raise InvalidValueError("prompt is missing; give one", field="prompt")
    return Request(parsed)


def _checked(key: _Key, name: str, value: Any) -> Any:
    if key.is_preset:
        return _preset(name, value)
    if isinstance(value, bool | dict | list):
        kind = type(value).__name__
        raise InvalidValueError(f"{name} is a {kind}, expected text or a number", field=name)
    return key.convert(value)


def _preset(name: str, value: Any) -> dict[str, Any] | None:
    """The values that the preset stands for, since a later version may have others; None for false. results.jsonl has
    values, too, which stay as they are."""
    if isinstance(value, dict) and set(value) == set(dataclasses.asdict(FAST)):
        return value
    chosen = {"true": True, "1": True, "false": False, "0": False, "": False}.get(str(value).strip().lower())
    if chosen is None:
        raise InvalidValueError(f"{name}={value!r} is neither true nor false", field=name)
    return dataclasses.asdict(FAST) if chosen else None


_NUMBERS = {option.field for option in options.SETTINGS} - {"negative_prompt", "scheduler"} | {
    "strength",
    "dense_max_tokens",
    *("upscale", "upscale_strength", "upscale_steps", "interpolate"),
}


def _text(value: Any) -> str:
    return str(value)


def _number(value: Any) -> Any:
    """A number from text, as CSV has them. Other text stays, for the common check of the settings to refuse."""
    if not isinstance(value, str):
        return value
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(value)
    return value


def _common_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the command line says for all lines."""
    parser, chosen = arguments.parser, dict[str, Any]()
    fields = {key.field for key in _keys().values()} - {"prompt", "output", "contact_sheet"}
    for action in parser._actions:
        value = getattr(arguments, action.dest, None)
        if action.dest in fields and value not in (None, [], action.default):
            chosen[action.dest] = [_plain(each) for each in value] if isinstance(value, list) else _plain(value)
    return chosen


def _plain(value: Any) -> Any:
    """A value of the command line as JSON has it."""
    if isinstance(value, FastSettings):
        return dataclasses.asdict(value)
    return value if isinstance(value, int | float | str) else str(value)
