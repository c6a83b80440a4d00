"""The device panel: against the real server, and with statuses that a CPU never gives."""

import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.comfyui.browser.frontend import Frontend
from tests.comfyui.checkout import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Route

pytestmark = pytest.mark.comfyui

DEMO = ROOT / "example_workflows" / "wan21_tpu_demo.json"
ROUTE = "**/comfy_tpu/status"
GB = 10**9
IDLE = {"stage": "idle", "what": "", "model": "", "part": "", "size": "", "done": 0, "total": 0, "node": None}
SIZE = "832×480×81"

SHARDING = {
    "mesh": {"dp": 2, "sp": 4, "tp": 1},
    "sharded": {"tensors": 0, "nbytes": 0, "bytes_per_device": 0},
    "gathered": {"tensors": 1097, "nbytes": 28_400_000_000, "bytes_per_device": 7_100_000_000},
    "replicated": {"tensors": 325, "nbytes": 16_700_000, "bytes_per_device": 16_700_000},
    "total": {"tensors": 1422, "nbytes": 28_416_700_000, "bytes_per_device": 7_116_700_000},
    "could_not_split": [],
}

NOTHING_RAN: dict[str, Any] = {
    "schema": 1,
    "started": False,
    "platform": None,
    "devices": [],
    "resident": [],
    "activity": IDLE,
    "step_seconds": None,
    "eta_seconds": None,
    "compiled": {"programs": 0, "from_cache": 0, "seconds": 0.0, "last": None, "latest": None},
}
DENOISING: dict[str, Any] = {
    **NOTHING_RAN,
    "started": True,
    "platform": "tpu",
    "devices": [
        {
            "id": number,
            "kind": "TPU v6 lite",
            "weights_bytes": 8 * GB,
            "used_bytes": (16 + 8 * number) * GB,
            "limit_bytes": 32 * GB,
        }
        for number in range(2)
    ],
    "resident": [
        {
            "label": "Wan-AI/Wan2.1-T2V-14B-Diffusers transformer",
            "model": "Wan 2.1 T2V 14B",
            "part": "transformer",
            "bytes_per_device": 7_150_000_000,
            "in_use": True,
            "sharding": SHARDING,
        },
        {"label": "<img src=x onerror=alert(1)> vae", "bytes_per_device": 254_000_000, "in_use": False},
    ],
    "activity": {
        "stage": "denoising",
        "what": SIZE,
        "model": "Wan 2.1 T2V 14B",
        "part": "",
        "size": SIZE,
        "done": 13,
        "total": 50,
        "node": "3",
    },
    "step_seconds": 1.372,
    "eta_seconds": 64.4,
    "compiled": {
        "programs": 5,
        "from_cache": 3,
        "seconds": 41.23,
        "last": f"transformer.denoise_step at {SIZE}",
        "latest": {"model": "Wan 2.1 T2V 14B", "part": "transformer", "size": SIZE},
    },
}
CROWDED: dict[str, Any] = {
    **DENOISING,
    "resident": [
        {**DENOISING["resident"][0], "model": "HunyuanVideo 1.5 720p t2v + a_lora_with_a_long_name_v2_rank64 0.8"},
        {**DENOISING["resident"][0], "part": "text_encoder_2", "in_use": False},
    ],
    "activity": {**DENOISING["activity"], "model": "HunyuanVideo 1.5 720p t2v", "part": "transformer_2"},
}
"""Long names, in every place."""


def test_a_run_shows_in_the_panel_and_free_memory_empties_the_device(frontend: Frontend) -> None:
    frontend.client.free()  # of what other tests left there
    frontend.client.eventually(lambda: not frontend.client.status()["resident"], "an empty device")
    frontend.open()
    frontend.open_workflow(DEMO)
    # A prompt of its own: ComfyUI would not run again what it has run for another test.
    frontend.set_widgets("Wan21TextEncoder", prompt="a blue star moving left on a gray background")
    frontend.open_panel()
    assert frontend.outcome(frontend.run()) == "execution_success"

    frontend.section("Now").get_by_text("Idle").wait_for()
    resident = frontend.section("Models in memory").get_by_role("listitem")
    shown = [text.splitlines() for text in resident.all_inner_texts()]
    assert [name for name, _ in shown] == ["demo"] * 3
    assert [facts.split(" · ")[0] for _, facts in shown] == ["text encoder", "transformer", "VAE"]
    weights = sum(entry["bytes_per_device"] for entry in frontend.client.status()["resident"])
    memory = frontend.section("Memory")
    memory.get_by_text(f"weights {weights / 1e6:.1f} MB").wait_for()
    # A CPU reports no memory: a bar could only be wrong.
    assert memory.get_by_role("meter").count() == 0
    memory.get_by_text("This device does not report its memory").wait_for()
    compiled, from_cache = frontend.section("Compiled programs").get_by_role("definition").all_inner_texts()[:2]
    assert int(compiled) + int(from_cache) > 0

    frontend.panel.get_by_role("button", name="Free memory").click()
    frontend.section("Models in memory").get_by_text("None.").wait_for()
    assert frontend.client.status()["resident"] == []


def test_the_panel_follows_a_run_live(frontend: Frontend) -> None:
    frontend.open()
    frontend.open_workflow(DEMO)
    frontend.set_widgets("Wan21TPUSampler", num_inference_steps=100)
    frontend.open_panel()
    prompt = frontend.run()
    now = frontend.section("Now")
    now.get_by_text(re.compile(r"^\d+ of 100 · \d+\.\d\d s/step · \d+:\d\d left$")).wait_for(timeout=120_000)
    progress = now.get_by_role("progressbar", name="Denoising")
    assert 0 < int(progress.get_attribute("aria-valuenow") or 0) <= 100
    assert frontend.outcome(prompt) == "execution_success"
    now.get_by_text("Idle").wait_for()


def test_before_anything_ran_there_is_one_friendly_sentence(frontend: Frontend) -> None:
    _serve(frontend, NOTHING_RAN)
    frontend.open()
    panel = frontend.open_panel()
    panel.get_by_text("Nothing has run on the device yet. Run a workflow with a TPU node").wait_for()
    assert panel.get_by_role("region").count() == 0
    assert panel.get_by_role("button", name="Free memory").is_disabled()


def test_two_chips_with_their_memory(frontend: Frontend) -> None:
    _open_with(frontend, DENOISING)
    memory = frontend.section("Memory")
    first, second = memory.get_by_role("meter").all()
    assert first.get_attribute("aria-label") == "TPU v6 lite · device 0"
    assert first.get_attribute("aria-valuetext") == "weights 8.0 GB · used 16.0 GB of 32.0 GB"
    assert _widths(first) == ["25%", "25%"]
    assert _widths(second) == ["25%", "50%"]
    assert not memory.get_by_text("does not report").is_visible()


def test_progress_and_programs(frontend: Frontend) -> None:
    _open_with(frontend, DENOISING)
    now = frontend.section("Now")
    assert now.inner_text().splitlines() == [
        *("Now", "Denoising", "Wan 2.1 T2V 14B", "832×480, 81 frames", "13 of 50 · 1.37 s/step · 1:04 left")
    ]
    assert _widths(now.get_by_role("progressbar")) == ["26%"]
    assert frontend.section("Compiled programs").inner_text().split("\n")[1:] == [
        *("Compiled here", "5", "From the cache", "3", "Time spent", "41.2 s"),
        *("Latest", "Wan 2.1 T2V 14B · transformer", "832×480, 81 frames"),
    ]

    compiling = {**DENOISING["activity"], "stage": "compiling", "part": "transformer", "done": 0, "total": 1}
    frontend.send_status({**DENOISING, "activity": {**compiling, "stage": "preparing"}, "eta_seconds": None})
    now.get_by_text("Preparing").wait_for()
    assert frontend.section("Compiled programs").get_by_text("Compiling now").count() == 0
    frontend.send_status({**DENOISING, "activity": compiling, "eta_seconds": None})
    frontend.section("Compiled programs").get_by_text("Compiling now").wait_for()
    assert "of 1" not in now.inner_text()

    loading = {**compiling, "stage": "loading", "size": "", "done": 3_200_000_000, "total": 28_600_000_000}
    frontend.send_status({**DENOISING, "activity": loading, "step_seconds": None, "eta_seconds": None})
    now.get_by_text("3.2 GB of 28.6 GB").wait_for()


def test_names_from_the_server_stay_text(frontend: Frontend) -> None:
    _open_with(frontend, DENOISING)
    rows = frontend.section("Models in memory").get_by_role("listitem")
    assert rows.nth(0).inner_text().split("\n") == [
        *("Wan 2.1 T2V 14B", "in use", "transformer · 7.2 GB per device"),
        *("Mesh", "dp=2 sp=4 tp=1", "Gathered for use", "1097 tensors, 28.4 GB"),
        *("Whole on every device", "325 tensors, 16.7 MB"),
    ]
    assert rows.nth(1).inner_text().split("\n") == [DENOISING["resident"][1]["label"], "254.0 MB per device"]
    assert frontend.panel.locator("img").count() == 0


def test_a_lost_connection_is_said_and_mended(frontend: Frontend) -> None:
    _open_with(frontend, DENOISING)
    frontend.page.evaluate("comfyAPI.api.api.dispatchEvent(new CustomEvent('reconnecting'))")
    frontend.panel.get_by_text("The server does not answer.").wait_for()
    assert frontend.panel.get_by_role("button", name="Free memory").is_disabled()

    _serve(frontend, {**DENOISING, "activity": IDLE})
    frontend.page.evaluate("comfyAPI.api.api.dispatchEvent(new CustomEvent('reconnected'))")
    frontend.section("Now").get_by_text("Idle").wait_for()
    assert not frontend.panel.get_by_text("The server does not answer.").is_visible()


def test_an_event_is_newer_than_an_answer_that_was_asked_for_before_it(frontend: Frontend) -> None:
    held: list[Route] = []
    frontend.page.route(ROUTE, lambda route: held.append(route))
    frontend.open()
    with frontend.page.expect_request(ROUTE):
        frontend.open_panel()
    frontend.send_status(DENOISING)
    frontend.section("Now").get_by_text("Denoising").wait_for()
    with frontend.page.expect_response(ROUTE) as info:
        held[0].fulfill(json=NOTHING_RAN)
    info.value.finished()
    # Two frames: the answer has been read by then, and would have been drawn.
    frontend.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert frontend.section("Now").get_by_text("Denoising").is_visible()


def test_a_server_of_another_version_is_said(frontend: Frontend) -> None:
    _serve(frontend, {"schema": 2})
    frontend.open()
    frontend.open_panel().get_by_text("This page and the server are of different versions.").wait_for()


def test_the_panel_opens_and_closes_again_and_again(frontend: Frontend) -> None:
    _open_with(frontend, DENOISING)
    for _ in range(2):
        frontend.page.get_by_role("button", name=re.compile("^TPU")).first.click()
        frontend.panel.wait_for(state="detached")
        frontend.open_panel()
        frontend.section("Now").get_by_text("Denoising").wait_for()
    assert frontend.panel.count() == 1


def test_the_panel_in_chinese_and_back(frontend: Frontend) -> None:
    _serve(frontend, DENOISING)
    frontend.open(Locale="zh")
    frontend.open_panel()
    frontend.section("当前").get_by_text("去噪").wait_for()
    frontend.page.get_by_role("button", name="TPU：内存、进度与已编译程序").wait_for()
    assert frontend.section("内存").get_by_role("meter").first.get_attribute("aria-valuetext") == (
        "权重 8.0 GB · 已用 16.0 GB，共 32.0 GB"
    )
    frontend.panel.get_by_role("button", name="释放内存").wait_for()

    frontend.page.evaluate("app.extensionManager.setting.set('Comfy.Locale', 'en')")
    frontend.section("Now").get_by_text("Denoising").wait_for()
    frontend.page.get_by_role("button", name="TPU: memory, progress and compiled programs").wait_for()


def test_a_language_that_we_do_not_speak_gets_english(frontend: Frontend) -> None:
    _serve(frontend, DENOISING)
    frontend.open(Locale="fr")
    frontend.open_panel()
    frontend.section("Now").get_by_text("Denoising").wait_for()


@pytest.mark.parametrize(("locale", "palette"), [("en", "dark"), ("en", "light"), ("zh", "dark"), ("zh", "light")])
def test_nothing_is_cut_off(frontend: Frontend, locale: str, palette: str) -> None:
    _serve(frontend, CROWDED)
    frontend.open(Locale=locale, ColorPalette=palette)
    frontend.open_panel()
    frontend.panel.get_by_text("HunyuanVideo 1.5 720p t2v").first.wait_for()
    cut_off = frontend.panel.evaluate(
        """(panel) => {
          const body = panel.querySelector(".comfy-tpu-body").getBoundingClientRect()
          return [...panel.querySelectorAll("*")].filter((part) =>
            part.scrollWidth > Math.ceil(part.getBoundingClientRect().width) && part.textContent.trim() ||
            part.getBoundingClientRect().right > body.right).map((part) => part.outerHTML)
        }"""
    )
    assert cut_off == []


@pytest.mark.parametrize("palette", ["dark", "light"])
def test_text_can_be_read_in_both_themes(frontend: Frontend, palette: str) -> None:
    _serve(frontend, DENOISING)
    frontend.open(ColorPalette=palette)
    frontend.open_panel()
    frontend.section("Now").wait_for()
    for selector in (".comfy-tpu-strong", ".comfy-tpu-muted", ".comfy-tpu-heading", ".comfy-tpu-button"):
        # 4.5 is what WCAG's level AA asks of small text.
        assert _contrast(frontend.panel.locator(selector).first) >= 4.5, selector


def _serve(frontend: Frontend, status: dict[str, Any]) -> None:
    """The newest one counts."""
    frontend.page.route(ROUTE, lambda route: route.fulfill(json=status))


def _open_with(frontend: Frontend, status: dict[str, Any]) -> None:
    _serve(frontend, status)
    frontend.open()
    frontend.open_panel()
    frontend.section("Now").wait_for()


def _widths(bar: "Locator") -> list[str]:
    widths: list[str] = bar.evaluate("bar => [...bar.children].map((part) => part.style.width)")
    return widths


def _contrast(text: "Locator") -> float:
    """By WCAG's formula, over the first background behind it that is not transparent."""
    ratio: float = text.evaluate(
        """(node) => {
          const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true })
          const rgba = (colour) => {
            canvas.clearRect(0, 0, 1, 1)
            canvas.fillStyle = colour
            canvas.fillRect(0, 0, 1, 1)
            return canvas.getImageData(0, 0, 1, 1).data
          }
          const luminance = (colour) => {
            const [r, g, b] = [...rgba(colour)].slice(0, 3).map((byte) => {
              const c = byte / 255
              return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4
            })
            return 0.2126 * r + 0.7152 * g + 0.0722 * b
          }
          let behind = node
          while (rgba(getComputedStyle(behind).backgroundColor)[3] < 255) behind = behind.parentElement
          const [dark, light] = [getComputedStyle(node).color, getComputedStyle(behind).backgroundColor]
            .map(luminance).sort((a, b) => a - b)
          return (light + 0.05) / (dark + 0.05)
        }"""
    )
    return ratio
