"""The pack's route for the device panel, the event with the same content, and the texts and previews on nodes."""

from __future__ import annotations

import functools
import ipaddress
import threading
import time
from collections.abc import Sequence

from aiohttp import web
from comfy.cli_args import args
from comfy_api import feature_flags
from comfy_execution.progress import get_progress_state
from protocol import BinaryEventTypes
from server import PromptServer

from comfy_tpu.comfy.node_text import NodeLine, join_line, lines_as_json
from comfy_tpu.comfy.status import STATUS

PATH = "/comfy_tpu/status"
EVENT = "comfy_tpu.status"
TEXT_EVENT = "comfy_tpu.node_text"

_SECONDS_BETWEEN = 0.1

_lock = threading.Lock()
_last_sent = 0.0
_is_pending = False
"""Whether a status was held back and will be sent when `_SECONDS_BETWEEN` have passed."""


@functools.cache  # a second copy of the pack must not stop ComfyUI: the same route twice is an error of its server's
def add_routes() -> None:
    PromptServer.instance.routes.get(PATH)(_get_status)


def send_status(*, immediately: bool = False) -> None:
    """Sends every browser the status: at most ten times a second, or `immediately`. May be called from any thread."""
    global _last_sent, _is_pending
    with _lock:
        moment = time.monotonic()
        wait = _last_sent + _SECONDS_BETWEEN - moment
        if not immediately and wait > 0:
            if not _is_pending:
                _is_pending = True
                loop = PromptServer.instance.loop
                loop.call_soon_threadsafe(loop.call_later, wait, functools.partial(send_status, immediately=True))
            return
        _last_sent, _is_pending = moment, False
    PromptServer.instance.send_sync(EVENT, STATUS.snapshot())


def send_node_text(node: str, lines: Sequence[NodeLine]) -> None:
    """Shows lines on a node, in the user's language where the browser has our extension, else in English."""
    server = PromptServer.instance
    text = "\n".join(map(join_line, lines))
    # First what the extension replaces the text by, then the text, which is all that other clients read.
    server.send_sync(TEXT_EVENT, {"node": node, "text": text, "lines": lines_as_json(lines)}, server.client_id)
    server.send_progress_text(text, node, server.client_id)


def send_preview(node: str, image: object) -> None:
    """Shows a preview on a node, by ComfyUI's own event and without its progress bar. May be called from any thread.

    The bar's hook would raise for Cancel here, and the run would never hear of it.
    """
    server, state = PromptServer.instance, get_progress_state()
    if feature_flags.supports_feature(server.sockets_metadata, server.client_id, "supports_preview_metadata"):
        names = {
            "node_id": node,
            "prompt_id": state.prompt_id,
            "display_node_id": state.dynprompt.get_display_node_id(node),
            "parent_node_id": state.dynprompt.get_parent_node_id(node),
            "real_node_id": state.dynprompt.get_real_node_id(node),
        }
        server.send_sync(BinaryEventTypes.PREVIEW_IMAGE_WITH_METADATA, (image, names), server.client_id)
    else:
        server.send_sync(BinaryEventTypes.UNENCODED_PREVIEW_IMAGE, image, server.client_id)


async def _get_status(request: web.Request) -> web.Response:
    try:
        host = request.url.host or ""
    except ValueError:  # a Host header that is none
        host = ""
    if not _is_own_address(host, args.listen):
        return web.json_response({"error": "this address is not the server's own"}, status=403)
    return web.json_response(STATUS.snapshot())


def _is_own_address(host: str, listen: str) -> bool:
    """Whether a request's Host is acceptable: a server on loopback accepts loopback names only, against DNS rebinding.
    A server that listens on a network accepts any name."""
    if not all(_is_loopback(address) for address in listen.split(",")):
        return True
    return _is_loopback(host)


def _is_loopback(name: str) -> bool:
    if name.strip().lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip()).is_loopback
    except ValueError:
        return False
