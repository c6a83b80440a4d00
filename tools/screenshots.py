"""The images of ComfyUI in the README and the guide, in both languages: the real server and frontend, the demo model.

python -m tools.screenshots docs/images

Needs what tests/comfyui/browser needs: a ComfyUI checkout, playwright and a Chromium.
"""

import io
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from tests.comfyui.browser.frontend import RUN_MS, Frontend, chromium
from tests.comfyui.checkout import ROOT, find_checkout
from tests.comfyui.client import ComfyClient
from tests.comfyui.server import running

DEMO = ROOT / "example_workflows" / "wan21_tpu_demo.json"
WIDTH, HEIGHT = 1600, 840
LANGUAGES = {"en": "", "zh": ".zh-CN"}
"""The frontend's language -> what the names of its images have before their suffix."""
COLOURS, EXACT_COLOURS = 256, 160
"""Of an image's palette: a third of the bytes, and no difference to be seen."""
PANEL_WIDTH = 400
"""The width of the toolbar and the panel, from the left of the window."""
BYTES_MAX = 150_000

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


def take_screenshots(frontend: Frontend, locale: str) -> dict[str, bytes]:
    page = frontend.page
    words = json.loads((ROOT / "locales" / locale / "main.json").read_text(encoding="utf-8"))["comfy_tpu"]
    frontend.open(Locale=locale)
    frontend.open_workflow(DEMO)
    # ComfyUI would not run again what it has run for the other language.
    frontend.set_widgets("Wan21TPUSampler", seed=list(LANGUAGES).index(locale))
    frontend.open_panel()
    page.evaluate(_PLACE_NODES, [PANEL_WIDTH + 20, WIDTH - 20, 110])
    assert frontend.outcome(frontend.run()) == "execution_success"
    frontend.red_in_video()
    page.locator("video").evaluate("video => { video.controls = false; video.currentTime = video.duration / 2 }")
    page.wait_for_function("() => !document.querySelector('video').seeking")
    now = frontend.section(words["now"])
    now.get_by_text(words["stage"]["idle"]).wait_for()
    suffix = LANGUAGES[locale]
    screenshots = {f"comfyui{suffix}.png": _capture_workflow(frontend)}

    # Once more, to see the panel while it denoises.
    frontend.set_widgets("Wan21TPUSampler", num_inference_steps=100, num_frames=49)
    frontend.run()
    now.get_by_text(words["seconds_per_step"].removeprefix("{seconds} ")).wait_for(timeout=RUN_MS)
    page.wait_for_function("() => document.querySelector('.comfy-tpu-panel [role=progressbar]').ariaValueNow > 30")
    screenshots[f"panel{suffix}.png"] = page.screenshot(
        clip={"x": 0, "y": 38, "width": PANEL_WIDTH - 26, "height": 715}
    )
    frontend.client.post("/interrupt", {})
    now.get_by_text(words["stage"]["idle"]).wait_for()
    return screenshots


def _capture_workflow(frontend: Frontend) -> bytes:
    frontend.page.mouse.move(PANEL_WIDTH + 5, HEIGHT - 5)
    # "1 job completed" goes by itself.
    frontend.page.get_by_text("job completed").wait_for(state="hidden")
    frontend.page.evaluate(_DRAWN)
    return frontend.page.screenshot()


def quantize_png(png: bytes) -> bytes:
    """With a palette: the commonest colours as they are, which are the frontend's, and the rest by median cut.

    Pillow's own palettes make the links gray, or the nodes green.
    """
    written = io.BytesIO()
    with Image.open(io.BytesIO(png)) as opened:
        image = opened.convert("RGB")
    pixels = np.asarray(image).reshape(-1, 3)
    colours, counts = np.unique(pixels, axis=0, return_counts=True)
    order = np.argsort(-counts)
    common, rare = colours[order[:EXACT_COLOURS]], colours[order[EXACT_COLOURS:]]
    palette = Image.new("P", (1, 1))
    entries = common.tobytes()
    if len(rare):
        others = Image.fromarray(rare[np.newaxis]).quantize(COLOURS - EXACT_COLOURS, Image.Quantize.MEDIANCUT)
        entries += bytes((others.getpalette() or [])[: 3 * (COLOURS - EXACT_COLOURS)])
    palette.putpalette(entries)
    image.quantize(palette=palette, dither=Image.Dither.NONE).save(written, "PNG", optimize=True)
    return written.getvalue()


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
    ):
        for locale in LANGUAGES:
            with browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}, locale="en-US") as context:
                made = take_screenshots(Frontend(context.new_page(), server, client), locale)
            for name, content in made.items():
                small = quantize_png(content)
                assert len(small) <= BYTES_MAX, f"{name} has {len(small)} bytes"
                (directory / name).write_bytes(small)


if __name__ == "__main__":
    main(sys.argv[1])
