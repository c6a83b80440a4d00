"""comfy-tpu bench: speed and error beside diffusers, in one run; `report`: a page from the results."""

from __future__ import annotations

import argparse

from comfy_tpu.bench.job import PARTS, PEERS, Job
from comfy_tpu.bench.page_texts import LANGUAGES
from comfy_tpu.cli.options import add_vae_backend, number_parser, parse_names, path_parser
from comfy_tpu.cli.terminal import print_message, print_paths, print_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = Job()
    parser.add_argument("--what", default=",".join(PARTS), metavar="PARTS", help=f"of {','.join(PARTS)} (all)")
    parser.add_argument(
        "--model",
        default=defaults.model,
        metavar="MODEL",
        help="a published model by its hub id, with random weights; demo; a directory; small or small:FAMILY "
        "(auto: small on a CPU, else the first published model)",
    )
    parser.add_argument(
        "--mesh", default=defaults.mesh, metavar="MESH", help=f"auto, single, or dp=2,sp=4 ({defaults.mesh})"
    )
    parser.add_argument("--size", nargs="+", default=[], metavar="SIZE", help="832x480x81, 720P … (the model's)")
    parser.add_argument("--peers", help=f"of {','.join(PEERS)} (all; a small model: ours,eager)")
    parser.add_argument("--dtype", default=defaults.dtype, choices=("auto", "bfloat16", "float32"))
    parser.add_argument(
        "--repeats",
        type=number_parser(int),
        default=defaults.repeats,
        metavar="N",
        help=f"times that each is measured ({defaults.repeats})",
    )
    parser.add_argument(
        "--steps", type=number_parser(int), default=defaults.steps, metavar="N", help=f"end to end ({defaults.steps})"
    )
    add_vae_backend(parser)
    parser.add_argument("--compile-regional", action="store_true", help="torch.compile of every block by itself")
    parser.add_argument(
        "--json", type=path_parser("--json"), metavar="FILE", help="raw samples; a file that is there gets one more run"
    )
    parser.add_argument("--markdown", type=path_parser("--markdown"), metavar="FILE", help="tables of this run")
    parser.add_argument("--plot", type=path_parser("--plot"), metavar="FILE", help="bars of this run, x.svg")
    commands = parser.add_subparsers(metavar="report", title="others")
    report = commands.add_parser("report", help="a page from JSON files", description="a page from JSON files")
    report.add_argument("files", nargs="+", type=path_parser("FILE"), metavar="FILE", help="what --json wrote")
    report.add_argument(
        "-o", "--output", type=path_parser("--output"), required=True, metavar="PAGE", help="x.md; plots go beside it"
    )
    report.add_argument(
        "--languages", default="en", metavar="LANGUAGES", help=f"of {','.join(LANGUAGES)}: x.md, x.zh-CN.md (en)"
    )
    report.set_defaults(bench=run_report)
    parser.set_defaults(bench=run_measurements)


def run(arguments: argparse.Namespace) -> int:
    status: int = arguments.bench(arguments)
    return status


def run_measurements(arguments: argparse.Namespace) -> int:
    from comfy_tpu.bench import report, runner

    request = Job(
        parts=parse_names(arguments.what, PARTS, "--what"),
        sizes=tuple(arguments.size),
        peers=parse_names(arguments.peers, PEERS, "--peers") if arguments.peers is not None else (),
        model=arguments.model,
        mesh=arguments.mesh,
        dtype=arguments.dtype,
        repeats=arguments.repeats,
        steps=arguments.steps,
        vae_backend=arguments.vae_backend,
        regional=arguments.compile_regional,
    )
    files = report.RunFiles.check(json=arguments.json, markdown=arguments.markdown, plot=arguments.plot)
    run = runner.run_bench(request, say=print_message, keep=files.keep)
    files.finish(run)
    print_text(report.format_tables(run))
    return 0


def run_report(arguments: argparse.Namespace) -> int:
    from comfy_tpu.bench import report

    languages = parse_names(arguments.languages, LANGUAGES, "--languages")
    print_paths(report.write_page(arguments.files, arguments.output, languages))
    return 0
