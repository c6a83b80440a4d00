"""ComfyUI's real frontend in a browser, in the words of somebody who uses it."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.comfyui.client import ComfyClient
from tests.comfyui.server import PACK, ComfyServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Error, Locator, Page

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
START_MS = 60_000
RUN_MS = 240_000
TPU_BUTTON = re.compile("^TPU")
_REGISTRY = "https://api.comfy.org/"
_OURS = (f"/extensions/{PACK}/", "comfy_tpu", "comfy-tpu", "Wan21", "TPUInfo")

# A frontend that has been used before (no tour, no list of templates on top), and nothing that covers the nodes.
_SETTINGS: dict[str, Any] = {
    "Comfy.TutorialCompleted": True,
    "Comfy.Minimap.Visible": False,
    "Comfy.Graph.CanvasInfo": False,
    "Comfy.Locale": "en",
    "Comfy.ColorPalette": "dark",
}

_READY = "() => window.app?.extensionManager?.workflow?.activeWorkflow && window.app.graph?.nodes.length"

# Where the red pixels of a video's first and last frame are, in shares of its width, and how many there are.
_RED = """async (video) => {
  const canvas = document.createElement("canvas")
  canvas.width = video.videoWidth
  canvas.height = video.videoHeight
  const context = canvas.getContext("2d")
  video.pause()
  const look = async (time) => {
    await new Promise((done) => { video.addEventListener("seeked", done, { once: true }); video.currentTime = time })
    context.drawImage(video, 0, 0)
    const { data } = context.getImageData(0, 0, canvas.width, canvas.height)
    let count = 0, sum = 0
    for (let i = 0; i < data.length; i += 4)
      if (data[i] > 120 && data[i + 1] < 80 && data[i + 2] < 80) { count += 1; sum += (i / 4) % canvas.width }
    return { share: count / (canvas.width * canvas.height), x: sum / count / canvas.width }
  }
  return [await look(0), await look(video.duration - 0.01)]
}"""


class NoBrowserError(Exception):
    """The reason, in one line."""


def find_chromium() -> Path:
    named = os.environ.get("CHROMIUM_PATH")
    if named:
        if not Path(named).is_file():
            raise NoBrowserError(f"CHROMIUM_PATH={named} does not exist")
        return Path(named)
    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if found is None:
        raise NoBrowserError(f"no {', '.join(CHROMIUM)} on the path; name a browser in CHROMIUM_PATH")
    return Path(found)


@contextmanager
def chromium() -> Iterator["Browser"]:
    path = find_chromium()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise NoBrowserError("a browser is driven by playwright: pip install playwright") from None
    # No sandbox: it cannot be had as root, in containers. No names: a page that asks other servers gets no answer.
    arguments = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--mute-audio"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@dataclass
class Complaints:
    """Errors and warnings in the console that our files caused, or that name us."""

    found: list[str] = field(default_factory=list)

    def watch(self, page: "Page") -> None:
        page.on("console", self._console)
        page.on("pageerror", self._page_error)

    def _console(self, message: "ConsoleMessage") -> None:
        self._add(message.type, f"{message.text} {message.location.get('url', '')}")

    def _page_error(self, error: "Error") -> None:
        self._add("error", f"{error.message} {error.stack}")

    def _add(self, kind: str, text: str) -> None:
        if _REGISTRY in text:  # the frontend asks it about every node, and is not let out
            return
        if kind in ("error", "warning") and any(name in text for name in _OURS):
            self.found.append(f"{kind}: {text}")


class Frontend:
    """One tab."""

    def __init__(self, page: "Page", server: ComfyServer, client: ComfyClient) -> None:
        self.page = page
        self.server = server
        self.client = client
        self.complaints = Complaints()
        self.complaints.watch(page)

    def open(self, **settings: Any) -> None:
        """Settings by their last name: ColorPalette="light", Locale="zh"."""
        chosen = {f"Comfy.{name}": value for name, value in settings.items()}
        self.client.post("/api/settings", _SETTINGS | chosen)
        self.page.goto(self.server.url)
        self.page.wait_for_function(_READY, timeout=START_MS)

    # workflows

    def open_template(self, name: str) -> None:
        """From the template browser, where ComfyUI lists what is in a pack's example_workflows/."""
        self.page.get_by_role("button", name="Templates").click()
        self.page.get_by_role("dialog").get_by_text(PACK, exact=True).first.click()
        self.page.get_by_test_id(f"template-workflow-{name}").click()
        self._wait_for_workflow(name)

    def open_workflow(self, workflow: Path | dict[str, Any]) -> None:
        """As the menu's Open does. A dictionary is a prompt in the API's format."""
        path = workflow if isinstance(workflow, Path) else self.server.base / "workflow.json"
        if not isinstance(workflow, Path):
            path.write_text(json.dumps(workflow), encoding="utf-8")
        self.page.locator("#comfy-file-input").set_input_files(path)
        self._wait_for_workflow(path.stem)

    def set_widgets(self, node_type: str, **values: Any) -> None:
        """Widgets are drawn on a canvas, where a browser has nothing to click on."""
        self.page.evaluate(
            """([type, values]) => {
              const node = app.graph.nodes.find((node) => node.type === type)
              for (const [name, value] of Object.entries(values))
                node.widgets.find((widget) => widget.name === name).value = value
            }""",
            [node_type, values],
        )

    def _wait_for_workflow(self, name: str) -> None:
        self.page.wait_for_function("name => app.extensionManager.workflow.activeWorkflow.filename === name", arg=name)

    # running

    def press_run(self) -> None:
        # Not by its name: newer frontends give it to the menu beside it, too.
        self.page.get_by_test_id("queue-button").click()

    def run(self) -> str:
        """Presses Run. The prompt's id."""
        with self.page.expect_response(lambda reply: reply.url.endswith("/api/prompt")) as info:
            self.press_run()
        answer: dict[str, Any] = info.value.json()
        assert "prompt_id" in answer, answer
        prompt_id: str = answer["prompt_id"]
        return prompt_id

    def cancel(self) -> None:
        self.page.get_by_role("button", name="Cancel current run").click()

    def outcome(self, prompt_id: str) -> str:
        """Waits for the prompt's end: "execution_success", "execution_interrupted" or "execution_error"."""
        path = f"/history/{prompt_id}"
        self.client.eventually(lambda: prompt_id in self.client.get(path), f"the end of {prompt_id}", RUN_MS / 1000)
        messages = self.client.get(path)[prompt_id]["status"]["messages"]
        last: str = messages[-1][0]
        return last

    def node_text(self, pattern: str) -> "Locator":
        """The text that a running node shows on itself."""
        return self.page.locator(".dom-widget").get_by_text(re.compile(pattern))

    def open_error(self) -> "Locator":
        """What the frontend shows of an error: a dialog; in newer versions a message, and a panel behind its button."""
        dialog = self.page.get_by_role("dialog")
        details = self.page.get_by_role("button", name="View details")
        dialog.or_(details).first.wait_for()
        if not details.is_visible():
            return dialog
        details.press("Enter")  # other messages may lie over it
        return self.page.locator("body")

    def red_in_video(self) -> list[dict[str, float]]:
        """Of the first and the last frame of the video that is shown: share of red pixels, and where they are."""
        video = self.page.locator("video")
        video.wait_for(timeout=RUN_MS)
        video.evaluate(
            """(video) => video.readyState >= 2 ||
               new Promise((done) => video.addEventListener("loadeddata", done, { once: true }))"""
        )
        frames: list[dict[str, float]] = video.evaluate(_RED)
        return frames

    # the panel

    def open_panel(self) -> "Locator":
        self.page.get_by_role("button", name=TPU_BUTTON).first.click()
        self.panel.wait_for()
        return self.panel

    @property
    def panel(self) -> "Locator":
        return self.page.locator(".comfy-tpu-panel")

    def section(self, name: str) -> "Locator":
        return self.panel.get_by_role("region", name=name, exact=True)

    def send_status(self, status: dict[str, Any]) -> None:
        """As if the server had sent it."""
        self.page.evaluate(
            "status => comfyAPI.api.api.dispatchEvent(new CustomEvent('comfy_tpu.status', { detail: status }))", status
        )
