"""The images of the server's page in docs/serve.md, in both languages: a real server with the demo model.

python -m tools.page_screenshots docs/images

Needs what tests/serving/test_page.py needs: playwright and a Chromium, and a font with Chinese characters.
"""

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.comfyui.browser.frontend import chromium
from tests.serving.test_page import RUN_MS, serving
from tools.screenshots import BYTES_MAX, quantize_png

if TYPE_CHECKING:
    from playwright.sync_api import Page

WIDTH, HEIGHT = 1280, 970
NAMES = {("en-US", "light"): "page.png", ("zh-CN", "dark"): "page.zh-CN.png"}
MADE = (
    "a red circle moving left on a white background",
    "a yellow triangle moving up on a black background",
    "a green square moving right on a black background",
)
RUNNING = ("an orange star moving down on a white background", "a blue circle moving right on a black background")


def _order(page: "Page", prompt: str, steps: int) -> None:
    page.locator("#prompt").fill(prompt)
    page.locator("#num_inference_steps").fill(str(steps))
    page.locator("#send").click()


def take_screenshot(page: "Page", address: str) -> bytes:
    page.goto(address)
    made = page.request.get(f"{address}/v1/videos").json()["data"]
    for prompt in () if made else MADE:
        _order(page, prompt, 30)
        page.locator("#gallery li").filter(has_text=prompt).locator("video").wait_for(timeout=RUN_MS)
    for prompt in RUNNING:
        _order(page, prompt, 300)
    page.wait_for_function("() => document.querySelector('#queue img[src]')", timeout=RUN_MS)
    page.wait_for_function("() => document.querySelector('#queue progress').value > 40", timeout=RUN_MS)
    for video in page.locator("#gallery video").all():
        video.evaluate("video => { video.controls = false; video.currentTime = video.duration / 3 }")
    page.wait_for_function("() => [...document.querySelectorAll('video')].every((video) => !video.seeking)")
    taken = page.screenshot()
    jobs = page.request.get(f"{address}/v1/videos").json()["data"]
    for job in jobs:
        if job["status"] != "completed":
            page.request.delete(f"{address}/v1/videos/{job['id']}")
    return taken


def main(directory: str) -> None:
    with tempfile.TemporaryDirectory() as served, serving(Path(served), ["demo"]) as address, chromium() as browser:
        for (locale, scheme), name in NAMES.items():
            with browser.new_context(
                viewport={"width": WIDTH, "height": HEIGHT},
                locale=locale,
                color_scheme=scheme,  # type: ignore[arg-type]
            ) as context:
                small = quantize_png(take_screenshot(context.new_page(), address))
            assert len(small) <= BYTES_MAX, f"{name} has {len(small)} bytes"
            (Path(directory) / name).write_bytes(small)


if __name__ == "__main__":
    main(sys.argv[1])
