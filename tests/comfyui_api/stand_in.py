"""A small HTTP server in the place of ComfyUI's: it answers as the test says, and writes down what it is asked."""

import contextlib
import json
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ID = "0a1b-2c3d"


class StandIn:
    """A run goes through `states`, one at each question for its history: a place in the queue (0: it runs), "gone", or
    its entry in the history, which stays."""

    def __init__(self):
        self.states = [0, entry()]
        self.files = {}
        """Content by (type, subfolder, filename)."""
        self.refusal = None
        """Status and JSON of the reply to a prompt."""
        self.activity = None
        self.cut = False
        """Replies with files end in the middle."""
        self.asked = []
        self.url = ""

    @property
    def state(self):
        return self.states[0]

    def reply(self, path, query, body):
        """Status and content: an object, bytes, or text that is not JSON."""
        self.asked.append((path, body or query))
        if path == "/prompt":
            return self.refusal or (200, {"prompt_id": ID, "number": 1, "node_errors": {}})
        if path == "/queue":
            return 200, self._queue()
        if path == f"/history/{ID}":
            if len(self.states) > 1:
                self.states.pop(0)
            return 200, {ID: self.state} if isinstance(self.state, dict) else {}
        if path == "/comfy_tpu/status" and self.activity is not None:
            return 200, {"activity": self.activity}
        key = tuple(query.get(name, "") for name in ("type", "subfolder", "filename"))
        return (200, self.files[key]) if path == "/view" and key in self.files else (404, "Not Found")

    def _queue(self):
        if not isinstance(self.state, int):
            return {"queue_running": [], "queue_pending": []}
        item = [7, ID, {}, {}, []]
        others = [[number, f"other-{number}", {}, {}, []] for number in range(self.state)]
        pending = [item, *others[1:]] if self.state else []
        return {"queue_running": others[:1] if self.state else [item], "queue_pending": pending}


def entry(outputs=None, *messages, status="success"):
    """Of the history."""
    return {"outputs": outputs or {}, "status": {"status_str": status, "completed": True, "messages": list(messages)}}


@contextlib.contextmanager
def serving():
    stand_in = StandIn()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._answer(None)

        def do_POST(self):
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body):
            parts = urllib.parse.urlsplit(self.path)
            status, content = stand_in.reply(parts.path, dict(urllib.parse.parse_qsl(parts.query)), body)
            data = content.encode() if isinstance(content, str) else content
            data = json.dumps(data).encode() if isinstance(data, dict) else data
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if stand_in.cut and parts.path == "/view" else data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stand_in.url = f"http://127.0.0.1:{server.server_address[1]}"
    stand_in.close = server.server_close
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield stand_in
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
