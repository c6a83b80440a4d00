"""The comfy-tpu command. A new command is one module here and one line in COMMANDS."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import errno
import gc
import importlib
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from signal import SIGHUP, SIGINT, SIGTERM
from types import FrameType
from typing import NoReturn

import comfy_tpu
from comfy_tpu.cli import hosts
from comfy_tpu.cli.options import argument_names, find_flag
from comfy_tpu.cli.streams import discard, is_output_broken, standard_streams
from comfy_tpu.cli.terminal import print_error, warning_lines
from comfy_tpu.errors import ComfyTpuError, InvalidValueError, is_out_of_host_memory, rename_as_flag
from comfy_tpu.pipeline.partial_files import remove_own
from comfy_tpu.terminal_text import excerpt, sanitize

INTERRUPTED = 130
"""128 + SIGINT, as a shell reports it."""

ADDRESS_SPACE_MIN = 3 * 2**30
"""Bytes with which the demo model runs on a CPU."""


_MACHINE_ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ESTALE)
"""Errors of a disk, of a network file system or of limits, which are no bugs wherever they come up."""


@dataclasses.dataclass(frozen=True)
class Command:
    name: str
    summary: str
    module: str
    """The module with add_arguments(parser) and run(arguments) -> exit status, imported only for its own command."""
    runs_models: bool = True


COMMANDS = (
    Command("generate", "make a video or an image from a prompt", "comfy_tpu.cli.generate"),
    Command("batch", "make a video of every line of a file, going on where it was", "comfy_tpu.cli.batch"),
    Command("serve", "answer requests in the form of OpenAI's images and videos API", "comfy_tpu.cli.serve"),
    Command("encode", "first stage of generate: the prompt to a file of embeddings", "comfy_tpu.cli.encode"),
    Command("denoise", "second stage of generate: embeddings to a file of latents", "comfy_tpu.cli.denoise"),
    Command("upscale", "stage between two denoisings: latents to larger latents", "comfy_tpu.cli.upscale"),
    Command("decode", "last stage of generate: latents to a video", "comfy_tpu.cli.decode"),
    Command("interpolate", "more frames per second, of a finished video", "comfy_tpu.cli.interpolate"),
    Command("models", "list the models that are known, here, and fit", "comfy_tpu.cli.models"),
    Command("download", "download a model, going on where it was", "comfy_tpu.cli.download", False),
    Command("warm", "compile the programs of a model and a size ahead", "comfy_tpu.cli.warm"),
    Command("cache", "list, measure or clear the compiled programs", "comfy_tpu.cli.cache", False),
    Command("lora", "say how much of a LoRA fits a model, and what it was made for", "comfy_tpu.cli.lora"),
    Command("calibrate", "measure which steps of a model can be reused, for --reuse", "comfy_tpu.cli.calibrate"),
    Command("bench", "measure speed and error beside diffusers", "comfy_tpu.cli.bench"),
    Command("plan", "say what a TPU slice would do with a model, before renting it", "comfy_tpu.cli.plan"),
    Command("port", "say what stands between a PyTorch model and a TPU", "comfy_tpu.cli.port"),
    Command("comfyui", "start a ComfyUI, or run a workflow on a running one", "comfy_tpu.cli.comfyui", False),
    Command("install", "put the nodes into a ComfyUI, and say what is missing", "comfy_tpu.cli.install", False),
    Command("doctor", "check this machine, and say what to mend", "comfy_tpu.cli.doctor", False),
)

HOSTS_COMMANDS = ("generate", "batch", "encode", "denoise", "upscale", "decode", "doctor")
"""Commands that run on several hosts as one."""


def main(argv: Sequence[str] | None = None) -> int:
    with standard_streams(), _rare_collections():
        given = sys.argv[1:] if argv is None else argv
        if hosts.find_config(given, HOSTS_COMMANDS)[0] is not None:
            hosts.run_to_exit(lambda: _run(given))
        return _run(given)


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Lets Python look for garbage less often: imports make a million objects that stay. 0.4 s of a start of 8 s."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _run(argv: Sequence[str]) -> int:
    names: Mapping[str, str] = {}
    try:
        with _raise_on_termination():
            try:
                with hosts.joined(argv, HOSTS_COMMANDS, _parse) as arguments:
                    names = arguments.names
                    if arguments.runs_models:
                        _check_address_space()
                    with warning_lines(
                        lambda text, field: rename_as_flag(text, field, find_flag(field, names)),
                        verbose=getattr(arguments, "verbose", False),
                    ):
                        status: int = arguments.run(arguments)
                    sys.stdout.flush()  # here, where a closed pipe can still be handled
            except SystemExit:  # of --help, which has printed it
                sys.stdout.flush()
                raise
            return status
    except KeyboardInterrupt:
        print_error("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader has gone (`comfy-tpu … | head`)
        discard(sys.stdout)
        return 1
    except Exception as error:
        sentence = _user_message(error)
        if sentence is None:
            raise
        field = getattr(error, "field", None)
        print_error(rename_as_flag(sentence, field, find_flag(field, names)))
        return 1


def _user_message(error: Exception) -> str | None:
    """The message that replaces a traceback; None for an error that is a bug."""
    if isinstance(error, ComfyTpuError):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] != "comfy_tpu":
        return f'{error.name} is not installed; pip install "{error.name}"'
    if is_out_of_host_memory(error):
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        return f"the process got no more memory ({reason}); raise its limit (ulimit -v), or close other programs"
    if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.EACCES) and error.filename is not None:
        # pathlib raises these where it is asked whether a path that was given is a file.
        return f"{excerpt(str(error.filename))} cannot be opened ({error.strerror}); give another path"
    if isinstance(error, OSError) and error.filename is None and is_output_broken():
        return f"standard output could not be written: {error.strerror or error}; send it elsewhere"
    if isinstance(error, OSError) and error.errno in _MACHINE_ERRORS:
        place = "a file" if error.filename is None else excerpt(str(error.filename))
        return f"{place} cannot be read or written ({error.strerror}); look at the disk and at the limits (ulimit -n)"
    return None


def _check_address_space() -> None:
    """Raises InvalidValueError for a small limit (ulimit -v), with which OpenBLAS would wait for ever on its import."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < ADDRESS_SPACE_MIN:
        raise InvalidValueError(
            f"this process may have {limit / 2**30:.1f} GiB of addresses (ulimit -v), and a model needs "
            f"{ADDRESS_SPACE_MIN / 2**30:.0f} GiB at least; raise the limit, or run it with `ulimit -v unlimited`"
        )


@contextlib.contextmanager
def _raise_on_termination() -> Iterator[None]:
    """Turns termination signals into exceptions, as Ctrl-C is one, so that partial files are removed.

    Not while a module is imported, which is most of the first seconds: numpy's and jax's extensions end in a
    segmentation fault or a traceback when their initialization is interrupted, or lose the signal. There the process
    ends at once.
    """

    def raise_exit(number: int, frame: FrameType | None) -> NoReturn:
        if _is_importing(frame):
            _end_at_once(number)
        if number == SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    here = threading.current_thread() is threading.main_thread()  # Python lets no other thread set handlers
    # Only signals with their default action: nohup ignores SIGHUP.
    defaults = {SIGTERM: signal.SIG_DFL, SIGHUP: signal.SIG_DFL, SIGINT: signal.default_int_handler}
    ours = {number: action for number, action in defaults.items() if here and signal.getsignal(number) is action}
    for number in ours:
        signal.signal(number, raise_exit)
    try:
        yield
    finally:
        for number, action in ours.items():
            signal.signal(number, action)


def _is_importing(frame: FrameType | None) -> bool:
    """Whether an import is under way in `frame` that began inside the command."""
    while frame is not None and frame.f_code is not _run.__code__:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _end_at_once(number: int) -> NoReturn:
    if number == SIGINT:
        print_error("interrupted")
    remove_own()
    os._exit(128 + number)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(sanitize(message))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    arguments, unknown = _parser(argv).parse_known_args(argv)
    if unknown:
        parser: argparse.ArgumentParser = arguments.parser
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_hint(unknown, arguments.names)}")
    return arguments


def _hint(unknown: Sequence[str], names: Mapping[str, str]) -> str:
    """A suggestion for unknown arguments; empty if there is none."""
    flags = [name for name in names.values() if name.startswith("--")]
    for argument in unknown:
        written = argument.partition("=")[0].replace("_", "-")
        if meant := difflib.get_close_matches(written, flags, 1, cutoff=0.8) if written.startswith("--") else []:
            return f"; did you mean {meant[0]}?"
    if names.get("prompt") == "PROMPT" and not any(argument.startswith("-") for argument in unknown):
        return "; put a PROMPT of several words in quotes"
    return ""


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = Parser(prog="comfy-tpu", description="Diffusion models on TPU, GPU and CPU through JAX.")
    parser.add_argument("--version", action="version", version=f"comfy-tpu {comfy_tpu.__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.summary, description=command.summary)
        if command.name in argv:
            module = importlib.import_module(command.module)
            module.add_arguments(subparser)
            subparser.set_defaults(
                run=module.run,
                runs_models=command.runs_models,
                parser=subparser,
                names=argument_names(subparser),
            )
    return parser
