"""The images of ComfyUI in the README: the real server, the real frontend, the demo model.

python -m tools.screenshots docs/images

Needs what tests/comfyui/browser needs: a ComfyUI checkout, playwright and a Chromium.
"""

import os
import sys
import tempfile
from pathlib import Path

from tests.comfyui.browser.frontend import RUN_MS, Frontend, chromium
from tests.comfyui.checkout import ROOT, find_checkout
from tests.comfyui.client import ComfyClient
from tests.comfyui.server import running

DEMO = ROOT / "example_workflows" / "wan21_tpu_demo.json"
WIDTH, HEIGHT = 1600, 760
PANEL_WIDTH = 400
"""The width of the toolbar and the panel, from the left of the window."""
BYTES_MAX = 400_000

# Where the nodes lie between the panel and the right edge, below the toolbar.
_PLACE_NODES = """([left, right, top]) => {
  const { ds, graph } = app.canvas
  const boxes = [...graph.nodes.map((node) => [...node.boundingRect]), ...graph.groups.map((g) => [...g._bounding])]
  const [x0, y0] = [0, 1].map((axis) => Math.min(...boxes.map((box) => box[axis])))
  const x1 = Math.max(...boxes.map((box) => box[0] + box[2]))
  ds.scale = (right - left) / (x1 - x0)
  ds.offset = [left / ds.scale - x0, top / ds.scale - y0]
  app.canvas.setDirty(true, true)
}"""
_DRAWN = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def take_screenshots(frontend: Frontend) -> dict[str, bytes]:
    page = frontend.page
    frontend.open()
    frontend.open_workflow(DEMO)
    frontend.open_panel()
    page.evaluate(_PLACE_NODES, [PANEL_WIDTH + 20, WIDTH - 20, 110])
    assert frontend.outcome(frontend.run()) == "execution_success"
    frontend.red_in_video()
    page.locator("video").evaluate("video => { video.controls = false; video.currentTime = video.duration / 2 }")
    page.wait_for_function("() => !document.querySelector('video').seeking")
    frontend.section("Now").get_by_text("Idle").wait_for()
    screenshots = {"comfyui.png": _capture_workflow(frontend)}

    # Once more, to see the panel while it denoises.
    frontend.set_widgets("Wan21TPUSampler", num_inference_steps=100, num_frames=49)
    frontend.run()
    frontend.section("Now").get_by_text("s/step").wait_for(timeout=RUN_MS)
    page.wait_for_function("() => document.querySelector('.comfy-tpu-panel [role=progressbar]').ariaValueNow > 30")
    screenshots["panel.png"] = page.screenshot(clip={"x": 0, "y": 38, "width": PANEL_WIDTH - 26, "height": 600})
    frontend.cancel()
    return screenshots


def _capture_workflow(frontend: Frontend) -> bytes:
    frontend.page.mouse.move(PANEL_WIDTH + 5, HEIGHT - 5)
    # "1 job completed" goes by itself.
    frontend.page.get_by_text("job completed").wait_for(state="hidden")
    frontend.page.evaluate(_DRAWN)
    return frontend.page.screenshot()


def main(directory: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        # Nothing compiled before, as on a user's first day.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(scratch) / "programs")
        _take_into(Path(directory), Path(scratch) / "base")


def _take_into(directory: Path, base: Path) -> None:
    with (
        running(find_checkout(), base) as server,
        ComfyClient(server) as client,
        chromium() as browser,
        browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}, locale="en-US") as context,
    ):
        for name, content in take_screenshots(Frontend(context.new_page(), server, client)).items():
            assert len(content) <= BYTES_MAX, f"{name} has {len(content)} bytes"
            (directory / name).write_bytes(content)


if __name__ == "__main__":
    main(sys.argv[1])
