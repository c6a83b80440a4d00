"""comfy-tpu serve: OpenAI's images and videos API. Jobs are on the disk before they are answered, and go on after a
restart."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comfy_tpu.cli import options
from comfy_tpu.cli.ray_options import add_ray, make_ray_config
from comfy_tpu.cli.terminal import print_message
from comfy_tpu.distribution import install_command
from comfy_tpu.errors import ComfyTpuError, InvalidValueError
from comfy_tpu.jobs.ray_workers import RayConfig, RayWorkers

if TYPE_CHECKING:
    from comfy_tpu.serving.config import ServeConfig
    from comfy_tpu.serving.planner import Planner
    from comfy_tpu.serving.served_model import ServedModel
    from comfy_tpu.serving.service import Service

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
_PACKAGES = ("fastapi", "uvicorn", "multipart")
_TURN_SECONDS = 0.0005
_KEYS_VARIABLE = "COMFY_TPU_API_KEYS"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models", nargs="+", metavar="MODEL", help="directories, hub ids, demo; the first is the default of requests"
    )
    parser.add_argument("--host", default=DEFAULT_HOST, help=f"others than this machine need keys ({DEFAULT_HOST})")
    parser.add_argument("--port", type=options.number_parser(int), default=DEFAULT_PORT, help=f"({DEFAULT_PORT})")
    parser.add_argument(
        "-d",
        "--directory",
        type=options.path_parser("--directory"),
        default=Path("served"),
        metavar="DIR",
        help="of the jobs and their files; started again with the same one, a server goes on where it was (served)",
    )
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="NAME=KEY",
        help="a client and its key of 16 characters or more, which clients must send then; may be repeated; also in "
        f"{_KEYS_VARIABLE}, separated by commas, where no other process sees them",
    )
    parser.add_argument(
        "--lora-directory",
        type=options.path_parser("--lora-directory"),
        metavar="DIR",
        help="LoRA files that clients may choose by name",
    )
    parser.add_argument(
        "--batch-size",
        type=options.number_parser(int),
        metavar="N",
        help="the most requests that share a step (default: as many as keep the devices busy and fit)",
    )
    parser.add_argument(
        "--queue-limit", type=options.number_parser(int), default=1000, metavar="N", help="jobs that may wait (1000)"
    )
    parser.add_argument(
        "--job-seconds",
        type=options.number_parser(float),
        metavar="S",
        help="refuse jobs that would take longer by their estimate (default: any time)",
    )
    parser.add_argument(
        "--sizes",
        metavar="WxH,...",
        help="refuse other sizes, such as 832x480,1280x720: the first job of each is compiled (default: any size)",
    )
    parser.add_argument(
        "--new-shapes",
        type=options.number_parser(int),
        default=20,
        metavar="N",
        help="new sizes and lengths that a client with a key may order in an hour; each is compiled (20)",
    )
    parser.add_argument(
        "--keep-days", type=options.number_parser(float), default=7.0, metavar="N", help="of finished jobs (7)"
    )
    parser.add_argument(
        "--keep-gb",
        type=options.number_parser(float),
        default=50.0,
        metavar="N",
        help="of their files and of inputs (50)",
    )
    parser.add_argument("--log-prompts", action="store_true", help="put prompts into the logs, which have none else")
    add_ray(parser)
    add_model_arguments(parser)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that decide how models are opened. Their values become part of every request."""
    options.add_machine(parser)
    options.add_vae_backend(parser)
    options.add_attention(parser)


def run(arguments: argparse.Namespace) -> int:
    check_packages()
    keys = parse_keys(arguments.api_key, os.environ)
    check_host(arguments.host, keys)
    listening = open_socket(arguments.host, arguments.port)  # first: the model takes a while
    from comfy_tpu.serving.logs import start_logs
    from comfy_tpu.serving.served_model import open_served_model
    from comfy_tpu.serving.shapes import check_models
    from comfy_tpu.serving.tracing import start_tracer

    config = _make_config(arguments, keys)
    models = {name: open_served_model(name, arguments.ignore_config_key) for name in config.models}
    check_models(config.limits.sizes, models)
    start_logs()
    tracer = start_tracer()
    with contextlib.closing(_open_service(config, models, make_ray_config(arguments), tracer)) as service:
        address = f"http://{arguments.host}:{arguments.port}"
        print_message(f"{address} serves {', '.join(models)}; jobs in {config.directory}")
        _serve(service, listening, tracer)
        if service.failure:
            raise ComfyTpuError(f"no job can be carried out: {service.failure}")
    return 0


def _make_config(arguments: argparse.Namespace, keys: Mapping[str, str]) -> ServeConfig:
    from comfy_tpu.serving.config import Limits, Retention, ServeConfig
    from comfy_tpu.serving.shapes import parse_sizes

    _check_positive(arguments)
    return ServeConfig(
        tuple(arguments.models),
        arguments.directory.absolute(),
        keys=keys,
        common=common_values(arguments),
        lora_directory=arguments.lora_directory,
        batch_size=arguments.batch_size,
        logs_prompts=arguments.log_prompts,
        limits=Limits(
            queued_jobs=arguments.queue_limit,
            job_seconds=arguments.job_seconds,
            sizes=parse_sizes(arguments.sizes) if arguments.sizes is not None else (),
            new_shapes=arguments.new_shapes,
        ),
        retention=Retention(arguments.keep_days * 86400.0, int(arguments.keep_gb * 1e9)),
    )


def _check_positive(arguments: argparse.Namespace) -> None:
    for name in ("batch_size", "queue_limit", "job_seconds", "new_shapes", "keep_days", "keep_gb"):
        value = getattr(arguments, name)
        if value is not None and not (isinstance(value, int | float) and 0 < value < float("inf")):
            raise InvalidValueError(f"{name}={value} is not above 0; give a number that is", field=name)


def _open_service(
    config: ServeConfig, models: Mapping[str, ServedModel], ray: RayConfig | None, tracer: Any | None
) -> Service:
    from comfy_tpu.jobs.preview_rate import PreviewRate
    from comfy_tpu.serving.planner import DevicePlanner, SlicePlanner
    from comfy_tpu.serving.service import Service

    previews, size = PreviewRate(), config.batch_size
    if ray is None:
        from comfy_tpu.jobs.local_worker import LocalWorker

        planner: Planner | None = DevicePlanner(config.common)
        return Service(
            config,
            models,
            lambda folder: LocalWorker(folder, batch_size=size, previews=previews),
            previews,
            planner=planner,
            tracer=tracer,
        )
    planner = None  # the devices are elsewhere
    if ray.slice_name is not None:
        from comfy_tpu.parallel.chips import parse_slice
        from comfy_tpu.pipeline.model_files import ModelFiles

        planner = SlicePlanner(parse_slice(ray.slice_name), ModelFiles.open)
    return Service(
        config,
        models,
        lambda folder: RayWorkers(folder, ray, batch_size=size, report=print_message, previews=previews),
        previews,
        planner=planner,
        tracer=tracer,
    )


def _serve(service: Service, listening: socket.socket, tracer: Any | None) -> None:
    """Until a signal, or until it turns out that no job can be carried out."""
    from comfy_tpu.serving.api import make_app
    from comfy_tpu.serving.connections import make_server

    server = make_server(make_app(service, tracer))

    def stop() -> None:
        server.should_exit = True

    service.on_failure = stop
    service.is_stopping = lambda: server.should_exit
    with _short_turns():
        service.start()
        server.run(sockets=[listening])


@contextlib.contextmanager
def _short_turns() -> Iterator[None]:
    """Lets threads of Python take turns faster: one that traces a model otherwise makes a request wait 5 ms each time
    that it has read the ledger or a socket."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_TURN_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def check_packages() -> None:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidValueError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed; a server needs more packages: "
            f"{install_command('serve')}"
        )


def parse_keys(given: list[str], environment: Mapping[str, str]) -> dict[str, str]:
    texts = [*given, *filter(None, environment.get(_KEYS_VARIABLE, "").split(","))]
    keys: dict[str, str] = {}
    for text in texts:
        name, equals, key = text.strip().partition("=")
        if not (name and equals and key):
            raise InvalidValueError("api_key is not NAME=KEY; give a name to each key", field="api_key")
        if len(key) < 16:
            raise InvalidValueError(
                f"the key of client {name} (--api-key) has fewer than 16 characters", field="api_key"
            )
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise InvalidValueError(
                f"the api_key of {name} has other characters than a header can carry; use letters and digits",
                field="api_key",
            )
        if key in keys.values():
            raise InvalidValueError(
                f"the api_key of {name} is another client's, too; give each its own", field="api_key"
            )
        if name in keys:
            raise InvalidValueError(f"api_key names {name} twice", field="api_key")
        keys[name] = key
    return keys


def check_host(host: str, keys: Mapping[str, str]) -> None:
    """Raises InvalidValueError where strangers could call without a key."""
    from comfy_tpu.serving.guards import is_loopback

    if not is_loopback(host) and not keys:
        raise InvalidValueError(
            f"host={host} lets other machines call, and there is no key; give --api-key NAME=KEY, or {DEFAULT_HOST}",
            field="host",
        )


def open_socket(host: str, port: int) -> socket.socket:
    if not 1 <= port <= 65535:
        raise InvalidValueError(f"port={port} is no port; choose one from 1 to 65535", field="port")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise InvalidValueError(
            f"port={port} of {host} cannot be used ({error.strerror}); choose another one", field="port"
        ) from error


def common_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """The values of the flags of `add_model_arguments` that differ from their defaults, as JSON has them."""
    parser = argparse.ArgumentParser()
    add_model_arguments(parser)
    chosen = {name: (getattr(arguments, name), default) for name, default in vars(parser.parse_args([])).items()}
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, (value, default) in chosen.items()
        if value != default
    }
