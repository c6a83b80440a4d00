"""The page in a real Chromium, of a real server with the demo models."""

import contextlib
import io
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from tests.comfyui.browser.frontend import NoBrowserError, chromium
from tests.families import small_flux
from tests.serving.real_server import RealServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow

KEY = "a-key-for-tests-0001"
RUN_MS = 120_000
WHITE = "a red circle moving left on a white background"
BLACK = "a blue square moving right on a black background"


@contextlib.contextmanager
def serving(directory: Path, models: Sequence[str] = ("demo", "demo-image"), **environment: str) -> Iterator[str]:
    """The address of a server that has made its first step."""
    with RealServer(directory, models=models, environment={**os.environ, **environment}) as server:
        yield server.url


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    try:
        with chromium() as browser:
            yield browser
    except NoBrowserError as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def address(browser: "Browser", tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("served")) as address:
        yield address


@contextlib.contextmanager
def tab(
    browser: "Browser", address: str, *, locale: str = "en-US", refusals: tuple[str, ...] = (), **options: Any
) -> Iterator["Page"]:
    """A new tab that remembers nothing, and in whose console nothing may appear but these refusals of the server."""
    complaints: list[str] = []
    with browser.new_context(viewport={"width": 1280, "height": 900}, locale=locale, **options) as context:
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.goto(address)
        yield page
        assert [text for text in complaints if not any(each in text for each in refusals)] == []


def order(page: "Page", prompt: str, steps: int = 4, **fields: str) -> None:
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.get_by_label("Steps").fill(str(steps))
    for label, value in fields.items():
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_role("button", name="Generate").click()


def finished(page: "Page", prompt: str) -> Any:
    """The card of the gallery."""
    card = page.locator("#gallery li").filter(has_text=prompt).first
    card.wait_for(timeout=RUN_MS)
    return card


def delete_all(page: "Page") -> None:
    while page.locator("#gallery li").count():
        card = page.locator("#gallery li").first
        id_ = card.locator(".prompt").inner_text()
        card.get_by_role("button", name=re.compile("Delete")).click()
        page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True).click()
        page.get_by_role("status").get_by_text("Deleted.").wait_for(state="attached")
        page.wait_for_function("id => document.querySelector('#gallery li .prompt')?.innerText !== id", arg=id_)


def test_a_video_from_order_to_deletion(browser: "Browser", address: str) -> None:
    with tab(browser, address) as page:
        order(page, WHITE, steps=60, Seed="7")
        waiting = page.locator("#queue li")
        preview = waiting.get_by_role("img", name=f"Preview of {WHITE}")
        preview.wait_for(timeout=RUN_MS)
        assert (preview.get_attribute("src") or "").startswith("data:image/jpeg;base64,")
        page.wait_for_function("() => document.querySelector('#queue img').naturalWidth === 8")
        page.wait_for_function("() => document.querySelector('#queue progress').value > 20", timeout=RUN_MS)
        card = finished(page, WHITE)
        assert waiting.count() == 0
        assert card.locator(".summary").inner_text() == "demo · 64×64 · 60 steps · seed 7"
        page.wait_for_function("() => document.querySelector('#gallery video')?.duration > 0.5")
        card.locator("video").evaluate("video => video.play()")
        page.wait_for_function("() => document.querySelector('#gallery video').currentTime > 0.1")

        with page.expect_download() as downloading:
            card.get_by_role("button", name=f"Download: {WHITE}").click()
        assert Path(downloading.value.path()).read_bytes()[4:8] == b"ftyp"
        assert downloading.value.suggested_filename.endswith(".mp4")

        page.get_by_label("Prompt", exact=True).fill("something else")
        page.get_by_label("Seed").fill("")
        card.get_by_role("button", name=f"Use these settings again: {WHITE}").click()
        values = {name: page.locator(f"#{name}").input_value() for name in ("prompt", "seed", "size", "model")}
        assert values == {"prompt": WHITE, "seed": "7", "size": "64x64", "model": "demo"}
        assert page.locator("#num_inference_steps").input_value() == "60"
        assert page.evaluate("document.activeElement.id") == "prompt"

        card.get_by_role("button", name=f"Delete: {WHITE}").click()
        page.get_by_role("dialog").get_by_role("button", name="Keep").click()
        assert card.count() == 1
        delete_all(page)
        page.get_by_text("Finished videos and images appear here.").wait_for()


def test_a_larger_video_by_a_second_pass(browser: "Browser", address: str) -> None:
    with tab(browser, address) as page:
        page.get_by_text("More settings").click()
        order(page, WHITE, Seed="7", **{"Enlarge by": "1.5"})
        card = finished(page, WHITE)
        assert card.locator(".summary").inner_text() == "demo · 96×96 · 4 steps · seed 7"
        page.wait_for_function("() => document.querySelector('#gallery video')?.videoWidth === 96")
        card.get_by_role("button", name=f"Use these settings again: {WHITE}").click()
        values = {name: page.locator(f"#{name}").input_value() for name in ("size", "upscale")}
        assert values == {"size": "64x64", "upscale": "1.5"}
        delete_all(page)


def test_a_running_job_is_cancelled(browser: "Browser", address: str) -> None:
    with tab(browser, address) as page:
        order(page, BLACK, steps=900)
        page.locator("#queue progress").wait_for(timeout=RUN_MS)
        page.get_by_role("button", name=f"Cancel: {BLACK}").click()
        card = finished(page, BLACK)
        card.get_by_text("Cancelled").wait_for()
        assert card.get_by_role("button", name=re.compile("Download")).count() == 0
        delete_all(page)


def test_a_video_that_begins_with_a_picture(browser: "Browser", address: str) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (64, 64), "white").save(picture, "PNG")
    with tab(browser, address) as page:
        page.get_by_label("Model").select_option("demo-image")
        order(page, "a red circle moving left")
        page.get_by_text("Choose a picture first.").wait_for()
        file = {"name": "x.png", "mimeType": "image/png", "buffer": picture.getvalue()}
        page.get_by_label("Picture").set_input_files(file)
        page.locator("#picture-thumbnails img").wait_for()
        page.get_by_role("button", name="Generate").click()
        card = finished(page, "a red circle moving left")
        card.locator("video").wait_for()
        card.get_by_role("button", name=re.compile("Use these")).click()
        page.get_by_text("Choose the picture again").wait_for()
        assert page.get_by_label("Model").input_value() == "demo-image"
        delete_all(page)


def test_more_orders_than_a_browser_has_connections(browser: "Browser", address: str) -> None:
    with tab(browser, address) as page:
        prompts = [f"{WHITE} {number}" for number in range(8)]
        for number, prompt in enumerate(prompts):
            order(page, prompt, steps=8)
            page.locator("#queue li, #gallery li").nth(number).wait_for()
        for prompt in prompts:
            finished(page, prompt)
        shown = page.locator("#gallery .prompt").all_inner_texts()
        assert shown == prompts[::-1]
        delete_all(page)


def test_images(browser: "Browser", tmp_path: Path) -> None:
    model = str(small_flux.directory("dev"))
    with serving(tmp_path, [model]) as address, tab(browser, address) as page:
        page.get_by_text("More settings").click()
        assert not page.get_by_label("Frames").is_visible()
        order(page, "a cat", steps=2, Size="64x96", Images="2")
        card = finished(page, "a cat")
        page.wait_for_function("() => document.querySelectorAll('#gallery img').length === 2")
        page.wait_for_function("() => document.querySelector('#gallery img').naturalHeight === 96")
        card.get_by_role("button", name=re.compile("Use these")).click()
        assert page.get_by_label("Images").input_value() == "2"
        delete_all(page)


def test_refusals_are_shown_in_the_servers_words(browser: "Browser", address: str) -> None:
    with tab(browser, address, refusals=("status of 400",)) as page:
        page.get_by_role("button", name="Generate").click()
        page.get_by_role("alert").get_by_text("Write a prompt first.").wait_for()
        order(page, "x" * 10_001)
        alert = page.get_by_role("alert").get_by_text("prompt has 10001 characters, and 10000 are the most")
        alert.wait_for()
        assert page.get_by_label("Prompt", exact=True).get_attribute("aria-invalid") == "true"
        order(page, WHITE, Size="7x7")
        page.get_by_role("alert").get_by_text("height=7").wait_for()
        assert page.get_by_label("Size").get_attribute("aria-invalid") == "true"
        assert page.evaluate("document.activeElement.id") == "size"
        assert page.locator("#queue li, #gallery li").count() == 0


def test_a_server_that_does_not_answer(browser: "Browser", address: str) -> None:
    with tab(browser, address, refusals=("ERR_INTERNET_DISCONNECTED",)) as page:
        page.get_by_label("Prompt", exact=True).wait_for()
        page.context.set_offline(True)
        order(page, WHITE)
        page.locator("#order-error").get_by_text("The server does not answer").wait_for()
        page.locator("#notice").get_by_text("The server does not answer").wait_for()
        page.context.set_offline(False)
        page.locator("#notice").wait_for(state="hidden")
        assert page.locator("#queue li").count() == 0


def test_markup_and_a_large_seed_stay_as_they_are(browser: "Browser", address: str) -> None:
    prompt = "<img src=x onerror=alert(1)><b>bold</b>"
    with tab(browser, address) as page:
        order(page, prompt, Seed=str(2**64 - 1))
        card = finished(page, prompt)
        assert card.locator("b, img").count() == 0
        assert card.locator(".summary").inner_text().endswith("seed 18446744073709551615")
        card.get_by_role("button", name=re.compile("Use these")).click()
        assert page.get_by_label("Seed").input_value() == "18446744073709551615"
        delete_all(page)


def test_with_the_keyboard_alone(browser: "Browser", address: str) -> None:
    with tab(browser, address) as page:
        page.get_by_label("Prompt", exact=True).wait_for()
        keyboard = page.keyboard

        def press_until(key: str, id_: str) -> None:
            for _ in range(40):
                if page.evaluate("document.activeElement.id || document.activeElement.className") == id_:
                    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                    assert outline == "solid", id_  # focus can be seen
                    return
                keyboard.press(key)
            raise AssertionError(id_)

        press_until("Tab", "prompt")
        keyboard.type(WHITE)
        press_until("Tab", "num_inference_steps")
        keyboard.type("4")
        keyboard.press("Control+Enter")
        finished(page, WHITE).locator("video").wait_for()
        press_until("Tab", "delete")
        keyboard.press("Enter")
        page.get_by_role("dialog").wait_for()
        keyboard.press("Escape")
        page.get_by_role("dialog").wait_for(state="hidden")
        press_until("Tab", "delete")
        keyboard.press("Enter")
        keyboard.press("Tab")
        keyboard.press("Enter")
        page.get_by_text("Finished videos and images appear here.").wait_for()


def test_languages(browser: "Browser", address: str) -> None:
    with tab(browser, address, locale="zh-CN") as page:
        page.get_by_role("button", name="生成").wait_for()
        assert page.evaluate("document.documentElement.lang") == "zh-CN"
        assert page.get_by_role("heading", name="队列").count() == 1
        page.get_by_role("button", name="English").click()
        page.get_by_role("button", name="Generate").wait_for()
        page.reload()
        page.get_by_role("button", name="Generate").wait_for()  # it is remembered
        page.get_by_role("button", name="中文").click()
        page.get_by_label("提示词", exact=True).wait_for()
    with tab(browser, address, locale="de-DE") as page:
        page.get_by_role("button", name="Generate").wait_for()


def test_dark_and_light_and_narrow(browser: "Browser", address: str) -> None:
    for scheme, is_dark in (("light", False), ("dark", True)):
        with tab(browser, address, color_scheme=scheme) as page:
            page.get_by_label("Prompt", exact=True).wait_for()
            page.set_viewport_size({"width": 360, "height": 700})
            assert page.evaluate("document.documentElement.scrollWidth") <= 360
            with Image.open(io.BytesIO(page.screenshot())) as image:
                assert (sum(image.convert("RGB").getpixel((2, 650))) < 200) is is_dark


def test_a_server_with_keys(browser: "Browser", tmp_path: Path) -> None:
    with (
        serving(tmp_path, COMFY_TPU_API_KEYS=f"ann={KEY}") as address,
        tab(browser, address, refusals=("status of 401",)) as page,
    ):
        dialog = page.get_by_role("dialog")
        dialog.wait_for()
        assert not page.get_by_label("Prompt", exact=True).is_visible()
        dialog.get_by_label("Key").fill("wrong")
        dialog.get_by_role("button", name="Enter").click()
        dialog.get_by_text("The server does not know this key.").wait_for()
        dialog.get_by_label("Key").fill(KEY)
        page.keyboard.press("Enter")
        order(page, WHITE, steps=60)
        page.locator("#queue img[src]").wait_for(timeout=RUN_MS)  # events carry the key
        finished(page, WHITE)
        page.wait_for_function("() => document.querySelector('#gallery video')?.duration > 0.5")
        page.reload()
        finished(page, WHITE)  # the tab still has the key
        assert KEY not in page.content()
        assert page.evaluate("localStorage.length + document.cookie.length") == 0
        page.get_by_role("button", name="Forget the key").click()
        dialog.wait_for()
        assert page.locator("#gallery li").count() == 0
        assert page.evaluate("sessionStorage.length") == 0
