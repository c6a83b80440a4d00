"""The options of workers in other processes or on other machines, by Ray."""

from __future__ import annotations

import argparse
import dataclasses

from comfy_tpu.cli.options import number_parser
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.jobs.ray_workers import RayConfig
from comfy_tpu.parallel import hosts

RAY_DEFAULTS = RayConfig()


def add_ray(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers",
        type=number_parser(int),
        metavar="N",
        help="processes of this machine that share the jobs, one for each GPU where there are any; with --ray, the "
        "most workers (default: one, in this process; with --ray, as many as the cluster has room for)",
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="share the jobs with the machines of a running Ray cluster: auto, or HOST:PORT of its head",
    )
    parser.add_argument(
        "--slice", metavar="NAME", help="with --ray: each worker is a TPU slice of this kind, such as v6e-16"
    )


def make_ray_config(arguments: argparse.Namespace) -> RayConfig | None:
    """None: one worker, in this process."""
    if arguments.ray is None and arguments.workers is None and arguments.slice is None:
        return None
    if hosts.host_names():
        given = next(name for name in ("ray", "workers", "slice") if getattr(arguments, name) is not None)
        raise InvalidValueError(
            f"{given}={getattr(arguments, given)} is for workers of Ray, and --coordinator makes all hosts one worker; "
            "give one of the two",
            field=given,
        )
    return dataclasses.replace(
        RAY_DEFAULTS, address=arguments.ray, workers=arguments.workers, slice_name=arguments.slice
    )
