"""Runs a node's stages on a server, with the same progress, previews and Cancel as on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import comfy.model_management
import folder_paths
from comfy_execution.utils import get_executing_context

from comfy_tpu.comfy.models import local_fingerprint
from comfy_tpu.comfy.node_text import NodeText, duration_text
from comfy_tpu.comfy.run import NodeReport, report_idle, run_lock
from comfy_tpu.comfy.server_node import KEYS_FILE
from comfy_tpu.config import Lora, RemoteServer, RunOptions, RuntimeConfig, SingleFiles
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.card import NodeSet
from comfy_tpu.remote.keys import find_key, parse_address

if TYPE_CHECKING:
    from comfy_tpu.remote.pipeline import RemotePipeline

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def remote_run(
    server: RemoteServer,
    family: NodeSet,
    model: str | SingleFiles,
    stages: Mapping[str, int],
    options: RunOptions,
    loras: Sequence[Lora] = (),
) -> Iterator[RemotePipeline]:
    """The model's pipeline on a server, reporting to the current node. `stages`: as in `pipeline_run`."""
    from comfy_tpu.remote.client import ServerClient
    from comfy_tpu.remote.pipeline import RemotePipeline, read_preview
    from comfy_tpu.remote.runner import Callbacks

    name = _check_choices(model, options.runtime)
    address = parse_address(server.address)
    key = find_key(address, os.environ, Path(folder_paths.get_user_directory(), KEYS_FILE))
    if key is not None and address.scheme == "http" and not address.is_loopback:
        _warn_of_http(str(address))
    client = ServerClient(address, key)
    context = get_executing_context()
    report = NodeReport(context.node_id if context else None, stages, family)
    shown = str(address)
    callbacks = Callbacks(
        report,
        comfy.model_management.throw_exception_if_processing_interrupted,
        lambda seconds: report.show_line(
            [NodeText("node.server_gone", {"server": shown, "time": duration_text(seconds)})]
        ),
        read_preview if report.shows_previews else None,
    )
    with run_lock, report.to_the_end():
        try:
            report.show_line([NodeText("node.connecting", {"server": shown})])
            pipeline = RemotePipeline.open(
                client, name, callbacks, loras=loras, preset=options.preset, wait_seconds=server.wait_seconds
            )
            _check_model(pipeline, family, name, shown)
            report.use_previews(pipeline.previews)
            yield pipeline
        finally:
            report_idle()


@functools.cache
def _warn_of_http(address: str) -> None:
    logger.warning("the key of %s travels unencrypted; use https outside of your own network", address)


def _check_choices(model: str | SingleFiles, runtime: RuntimeConfig) -> str:
    """The name of the model. Raises InvalidValueError for what a server has chosen when it was started."""
    if isinstance(model, SingleFiles):
        raise InvalidValueError(
            "pipeline is a model in files of this machine, and a server has its own; choose a model_id that the server "
            "was started with",
            field="pipeline",
        )
    default = RuntimeConfig()
    for field in dataclasses.fields(RuntimeConfig):
        if getattr(runtime, field.name) != getattr(default, field.name):
            raise InvalidValueError(
                f"options sets {field.name}, which a server has chosen when it was started; leave it at its default, "
                "and give it to `comfy-tpu serve`",
                field="options",
            )
    return model


def _check_model(pipeline: RemotePipeline, family: NodeSet, name: str, server: str) -> None:
    if pipeline.model.card.name not in (each.name for each in family.models):
        raise InvalidValueError(
            f"model_id={name} is a {pipeline.model.card.name} model at {server}, and this is a node of {family.name}; "
            "use the nodes of the model's own family",
            field="model_id",
        )
    here = local_fingerprint(name, family)
    if here is not None and here != pipeline.model_fingerprint:
        raise InvalidValueError(
            f"model_id={name} is another model at {server} ({pipeline.model_fingerprint}) than in ComfyUI's "
            f"models/diffusers ({here}); bring the same files to both, or remove those here",
            field="model_id",
        )
