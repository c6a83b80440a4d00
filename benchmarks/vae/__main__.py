"""python -m benchmarks.vae: the Wan VAE by torchax, Flax NNX and diffusers, from a fresh process to its videos."""

from __future__ import annotations

import argparse
import sys

from benchmarks.vae import report, runner
from benchmarks.vae.choices import VARIANTS, VaeChoices
from comfy_tpu.bench.report import RunFiles
from comfy_tpu.cli.options import number_parser, parse_names, path_parser
from comfy_tpu.cli.terminal import print_error, print_message, print_text
from comfy_tpu.errors import ComfyTpuError, rename_as_flag


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.vae",
        description="torchax, Flax NNX and diffusers side by side: start, decode, memory, error",
    )
    parser.add_argument("--frames", type=number_parser(int), metavar="N", help="4n+1 (81)")
    parser.add_argument("--height", type=number_parser(int), metavar="N", help="pixels (48; with --full-size 480)")
    parser.add_argument("--width", type=number_parser(int), metavar="N", help="pixels (64; with --full-size 832)")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"))
    parser.add_argument(
        "--repeats",
        type=number_parser(int),
        default=VaeChoices.repeats,
        metavar="N",
        help=f"times that each is measured ({VaeChoices.repeats})",
    )
    parser.add_argument("--variants", help=f"of {','.join(VARIANTS)} (all; on a CPU without compile)")
    parser.add_argument(
        "--full-size", action="store_true", help="Wan 2.1's own channels, not a sixth: for accelerators"
    )
    parser.add_argument(
        "--json", type=path_parser("--json"), metavar="FILE", help="raw samples; a file that is there gets one more run"
    )
    parser.add_argument(
        "-o", "--output", type=path_parser("--output"), metavar="FILE", help="tables, x.md; plots go beside it"
    )
    return parser


def run(arguments: argparse.Namespace) -> None:
    choices = VaeChoices(
        frames=arguments.frames,
        height=arguments.height,
        width=arguments.width,
        dtype=arguments.dtype,
        repeats=arguments.repeats,
        variants=parse_names(arguments.variants, tuple(VARIANTS), "--variants")
        if arguments.variants is not None
        else (),
        full_size=arguments.full_size,
    )
    files = RunFiles.check(json=arguments.json)
    if arguments.output is not None:
        report.check_output(arguments.output, arguments.json)
    measured = runner.run_comparison(choices, say=print_message, keep=files.keep)
    if arguments.output is not None:
        report.write_output(arguments.output, measured)
    print_text(report.tables(measured))


def main() -> int:
    parser = make_parser()
    try:
        run(parser.parse_args())
    except ComfyTpuError as error:
        flag = None if error.field is None else f"--{error.field.replace('_', '-')}"
        print_error(rename_as_flag(str(error), error.field, flag))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
