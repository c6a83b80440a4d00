"""The options of a run on several hosts, and what a command does there before it runs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from comfy_tpu.cli.options import number_parser
from comfy_tpu.cli.streams import library_output_discarded
from comfy_tpu.cli.terminal import print_error
from comfy_tpu.config import HostsConfig, Lora
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.jobs.request import MEDIA_FIELDS
from comfy_tpu.parallel import hosts

FLAGS = ("--coordinator", "--num-processes", "--process-id", "--hosts-timeout")

_SAME = (
    *("model", "mesh", "platform", "dtype", "quantize", "vae_backend", "tiny_vae", "transformer", "text_encoder"),
    *(
        "vae",
        "image_encoder",
        "attention",
        "attention_window",
        "attention_blocks",
        "dense_max_tokens",
        "fast",
        "ignore_config_key",
    ),
)
"""Options that must be the same on all hosts. All others are those of the first host."""
_INPUTS = (*MEDIA_FIELDS, "text", "latents", "lora")
"""Files that only the first host needs to have."""
_OUTPUTS = ("profile", "dump")


def add_hosts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "several hosts", "Run the same command on every host. Prompt, settings and files are those of process 0."
    )
    _add_flags(group)


def _add_flags(parser: argparse._ActionsContainer) -> None:
    defaults = HostsConfig()
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help="address of process 0; auto on TPU slices, GKE and Slurm"
    )
    parser.add_argument("--num-processes", type=number_parser(int), metavar="N", help="number of hosts")
    parser.add_argument("--process-id", type=number_parser(int), metavar="I", help="number of this host, from 0")
    parser.add_argument(
        "--hosts-timeout",
        type=number_parser(float),
        metavar="SECONDS",
        help=f"how long to wait for the others ({defaults.hosts_timeout:g})",
    )


def find_config(argv: Sequence[str], commands: Collection[str]) -> tuple[HostsConfig | None, list[str]]:
    """The hosts of a command line, None where it has no such option; and the rest of it."""
    asks = any(argument.partition("=")[0] in FLAGS for argument in argv)
    command = next((argument for argument in argv if not argument.startswith("-")), None)
    if not asks or command not in commands or {"-h", "--help"} & {*argv}:
        return None, list(argv)
    # Without abbreviations, which could be those of other options.
    parser = argparse.ArgumentParser(prog=f"comfy-tpu {command}", add_help=False, allow_abbrev=False)
    _add_flags(parser)
    found, rest = parser.parse_known_args(argv)
    given = {name: value for name, value in vars(found).items() if value is not None}
    return HostsConfig(**given), rest


@contextlib.contextmanager
def joined(
    argv: Sequence[str], commands: Collection[str], parse: Callable[[Sequence[str]], argparse.Namespace]
) -> Iterator[argparse.Namespace]:
    """The parsed command line; on a host that is not the first, that of the first one.

    `commands`: those that run on several hosts.
    """
    config, rest = find_config(argv, commands)
    if config is None:
        arguments = parse(argv)
        _refuse_abbreviations(arguments)
        yield arguments
        return
    from comfy_tpu.pipeline.partial_files import remove_own

    with hosts.start_hosts(config, report=print_error, cleanups=(remove_own,)), library_output_discarded():
        arguments = parse(rest)
        hosts.check_same(**_same_options(arguments))
        chosen = hosts.first_host_value(lambda: rest)
        if not hosts.is_first_host():
            arguments = parse(chosen)
            vars(arguments).update({name: None for name in _OUTPUTS if hasattr(arguments, name)})
        sends = getattr(arguments, "sends_inputs", True)
        with hosts.shared_files(_input_files(arguments) if sends else {}) as files:
            if sends:
                _replace_inputs(arguments, files)
            if arguments.runs_models:
                hosts.start_devices(config)
            yield arguments


def run_to_exit(run: Callable[[], int]) -> NoReturn:
    """Runs a command of several hosts, and ends the process at once: at Python's exit XLA waits for all that it has
    begun, also for collectives with processes that are gone."""
    try:
        status: Any = run()
    except SystemExit as error:
        status = error.code or 0
    except BaseException:  # noqa: BLE001 - printed as Python would print it
        traceback.print_exc()
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status if isinstance(status, int) else 1)


def _refuse_abbreviations(arguments: argparse.Namespace) -> None:
    for flag in FLAGS:
        name = flag[2:].replace("-", "_")
        if getattr(arguments, name, None) is not None:
            raise InvalidValueError(f"{name} is abbreviated; write {flag} in full", field=name)


def _same_options(arguments: argparse.Namespace) -> dict[str, str]:
    given = {name: getattr(arguments, name, None) for name in _SAME}
    shown = {
        name: ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in given.items()
        if value is not None
    }
    return {"command": arguments.parser.prog, **dict.fromkeys(_SAME, "not given"), **shown}


def _input_files(arguments: argparse.Namespace) -> dict[str, Path]:
    """The input files of a command line, by the option and their number."""
    return {
        f"{name} {number}": value.path if isinstance(value, Lora) else value
        for name in _INPUTS
        for number, value in enumerate(_as_list(getattr(arguments, name, None)))
    }


def _replace_inputs(arguments: argparse.Namespace, files: dict[str, Path]) -> None:
    for name in _INPUTS:
        given = getattr(arguments, name, None)
        replaced = [
            dataclasses.replace(value, path=files[f"{name} {number}"])
            if isinstance(value, Lora)
            else files[f"{name} {number}"]
            for number, value in enumerate(_as_list(given))
        ]
        if replaced:
            setattr(arguments, name, replaced if isinstance(given, list) else replaced[0])


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
