"""TPU Server: the address of a server on which the nodes of a family run, in place of this machine."""

from __future__ import annotations

import math
from typing import Any

from comfy_api.latest import io

from comfy_tpu.comfy.inputs import SERVER_TYPE
from comfy_tpu.config import RemoteServer
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.remote.keys import VARIABLE, parse_address
from comfy_tpu.remote.runner import WAIT_SECONDS

DEFAULT_ADDRESS = "http://127.0.0.1:8000"
KEYS_FILE = "comfy_tpu_server_keys.txt"
"""In ComfyUI's user directory."""


class TPUServer(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TPUServer",
            display_name="TPU Server",
            category="TPU",
            description="A server of comfy-tpu serve, on which encoders, sampler and decoder run in place of this "
            "machine.",
            inputs=[
                io.String.Input(
                    "address",
                    default=DEFAULT_ADDRESS,
                    tooltip="http://HOST:PORT or https://HOST. A key is not part of it: put ADDRESS=KEY into the "
                    f"variable {VARIABLE}, or into user/{KEYS_FILE} of ComfyUI.",
                ),
                io.Float.Input(
                    "wait_seconds",
                    default=WAIT_SECONDS,
                    min=0.0,
                    max=86400.0,
                    step=1.0,
                    tooltip="How long a server that does not answer is waited for. Started again in time, it goes on "
                    "with the job.",
                ),
            ],
            outputs=[SERVER_TYPE.Output("server", tooltip="For the server input; the same for all nodes of a run.")],
        )

    @classmethod
    def validate_inputs(cls, address: str | None = None) -> bool | str:
        try:
            if address is not None:
                parse_address(address)
        except InvalidValueError as error:
            return str(error)
        return True

    @classmethod
    def execute(cls, address: str, wait_seconds: Any) -> io.NodeOutput:
        if not isinstance(wait_seconds, (int, float)) or not math.isfinite(wait_seconds) or wait_seconds < 0:
            raise InvalidValueError(f"wait_seconds={wait_seconds!r} is no number from 0 on", field="wait_seconds")
        return io.NodeOutput(RemoteServer(str(parse_address(address)), float(wait_seconds)))
