"""comfy-tpu comfyui: starts a ComfyUI, or runs a workflow on a running one, over its API.

With --json, `run` prints one object. Its keys stay; new ones may be added:

    schema      1
    server      its address
    prompt_id   what the server calls the run
    seconds     from the queue to the end
    outputs     paths of the files that were fetched
    results     node, filename, subfolder and type of every file that a node lists
    texts       what nodes show as text, by node
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import sys

from comfy_tpu.cli.options import number_parser, path_parser
from comfy_tpu.cli.terminal import print_message, print_paths, print_text

SERVER = "http://127.0.0.1:8188"
TIMEOUT = 3600


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    run_ = commands.add_parser(
        "run",
        help="queue a workflow, follow it, and fetch its results",
        description="Queues a workflow on a running ComfyUI and waits for its end. The exit status is 1 if ComfyUI "
        "refuses it, a node fails, the server is lost or the time is over.",
    )
    run_.add_argument(
        "workflow",
        type=path_parser("WORKFLOW"),
        metavar="WORKFLOW",
        help="a file in ComfyUI's API form: Workflow > Export (API)",
    )
    run_.add_argument("--server", default=SERVER, metavar="URL", help=f"where ComfyUI listens ({SERVER})")
    run_.add_argument(
        "-o", "--output", type=path_parser("--output"), metavar="DIR", help="fetch the results into this directory"
    )
    run_.add_argument(
        "--timeout", type=number_parser(float), default=TIMEOUT, metavar="SECONDS", help=f"until its end ({TIMEOUT})"
    )
    run_.add_argument("--json", action="store_true", help="print one JSON object instead of the files' paths")
    run_.set_defaults(comfyui=_run_workflow)
    start = commands.add_parser(
        "start",
        help="start a ComfyUI for the nodes of this pack",
        description="Starts ComfyUI with this Python, its own torch on the CPU where there is no NVIDIA driver. What "
        "follows the directory goes to ComfyUI.",
    )
    start.add_argument(
        "comfyui_dir", type=path_parser("COMFYUI_DIR"), metavar="COMFYUI_DIR", help="the directory that holds main.py"
    )
    start.add_argument("options", nargs=argparse.REMAINDER, metavar="...", help="ComfyUI's own: --port 8200 --listen …")
    start.set_defaults(comfyui=_start)


def run(arguments: argparse.Namespace) -> int:
    status: int = arguments.comfyui(arguments)
    return status


def _start(arguments: argparse.Namespace) -> int:
    from comfy_tpu.installation import ComfyUI, start_command

    comfyui = ComfyUI.open(arguments.comfyui_dir)
    command = start_command(comfyui, [each for each in arguments.options if each != "--"])
    print_message(f"cd {shlex.quote(str(comfyui.directory))} && {shlex.join(command)}")
    sys.stderr.flush()
    os.chdir(comfyui.directory)
    os.execv(command[0], command)  # its signals and its exit status are ComfyUI's own


def _run_workflow(arguments: argparse.Namespace) -> int:
    from comfy_tpu.comfyui_api.client import Client
    from comfy_tpu.comfyui_api.run import check_timeout, fetch_results, run_workflow
    from comfy_tpu.comfyui_api.workflow import read_workflow
    from comfy_tpu.pipeline.atomic import check_directory

    timeout = check_timeout(arguments.timeout)
    workflow, client = read_workflow(arguments.workflow), Client(arguments.server)
    if arguments.output is not None:
        check_directory(arguments.output, field="output")
    outcome = run_workflow(client, workflow, timeout=timeout, on_progress=print_message)
    files = outcome.finished.files
    fetched = fetch_results(client, files, arguments.output) if arguments.output is not None else []
    if arguments.json:
        document = {
            "schema": 1,
            "server": client.url,
            "prompt_id": outcome.prompt_id,
            "seconds": outcome.seconds,
            "outputs": [str(path) for path in fetched],
            "results": [dataclasses.asdict(file) for file in files],
            "texts": outcome.finished.texts,
        }
        print(json.dumps(document, indent=2))
    elif arguments.output is not None:
        print_paths(fetched)
    else:
        print_text("\n".join(map(str, files)) or "done; no node lists a file")
    return 0
