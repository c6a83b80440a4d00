"""The comfy-tpu command. A new command is one module here and one line in COMMANDS."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import sys
from collections.abc import Sequence

import comfy_tpu
from comfy_tpu.errors import ComfyTpuError

INTERRUPTED = 130
"""128 + SIGINT, as a shell reports it."""


@dataclasses.dataclass(frozen=True)
class Command:
    name: str
    summary: str
    module: str
    """Has add_arguments(parser) and run(arguments) -> exit status. Imported only when the command is asked for."""


COMMANDS = (Command("doctor", "check this machine, and say what to mend", "comfy_tpu.cli.doctor"),)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        arguments = _parser(argv).parse_args(argv)
        status: int = arguments.run(arguments)
        sys.stdout.flush()  # here, where a closed pipe can still be handled
        return status
    except ComfyTpuError as error:
        print(f"comfy-tpu: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "comfy_tpu":
            raise
        print(f'comfy-tpu: {error.name} is not installed; pip install "{error.name}"', file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("comfy-tpu: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (`comfy-tpu … | head`). Python would fail once more flushing stdout on the way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="comfy-tpu", description="Diffusion models on TPU, GPU and CPU through JAX.")
    parser.add_argument("--version", action="version", version=f"comfy-tpu {comfy_tpu.__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.summary, description=command.summary)
        if command.name in argv:
            module = importlib.import_module(command.module)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    return parser
