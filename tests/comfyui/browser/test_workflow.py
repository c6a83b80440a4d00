"""A user opens the example, runs it, cancels it, and sees what is wrong when something is."""

import re

import pytest

from tests.comfyui.browser.frontend import RUN_MS, Frontend
from tests.comfyui.checkout import ROOT

pytestmark = pytest.mark.comfyui

DEMO = ROOT / "example_workflows" / "wan21_tpu_demo.json"
SETTINGS = {
    "height": 256,
    "width": 256,
    "num_inference_steps": 2,
    "guidance_scale": 3.0,
    "seed": 1,
    "flow_shift": 3.0,
    "model_id": "demo",
}


def test_the_example_from_the_template_browser_gives_a_red_circle_that_moves_right(frontend: Frontend) -> None:
    frontend.open()
    frontend.open_template("wan21_tpu_demo")
    # ComfyUI would not run again what another test has run.
    frontend.set_widgets("Wan21TPUSampler", seed=31)
    prompt = frontend.run()
    frontend.node_text(r"step \d+/20").wait_for(timeout=RUN_MS)
    assert frontend.outcome(prompt) == "execution_success"
    frontend.node_text(r"done in \d+\.\d s").first.wait_for()
    assert frontend.node_text(r"step \d+/20").count() == 0

    first, last = frontend.red_in_video()
    for frame in (first, last):
        assert 0.02 < frame["share"] < 0.4, (first, last)
    assert last["x"] - first["x"] > 0.2, (first, last)


def test_tpu_info_shows_its_text_on_the_node_and_keeps_it_out_of_the_prompt(frontend: Frontend) -> None:
    frontend.open()
    frontend.open_workflow({"1": {"class_type": "TPUInfo", "inputs": {}}})
    assert frontend.outcome(frontend.run()) == "execution_success"
    shown = frontend.page.locator(".dom-widget textarea")
    frontend.page.wait_for_function("text => text.value.includes('device')", arg=shown.element_handle())
    assert re.match(r"\d+ \w+ devices?\n", shown.input_value())
    assert not shown.is_editable()
    prompt = frontend.page.evaluate("async () => (await app.graphToPrompt()).output")
    assert prompt == {"1": {"inputs": {}, "class_type": "TPUInfo", "_meta": {"title": "TPU Info"}}}


def test_cancel_ends_the_run_and_the_next_one_works(frontend: Frontend) -> None:
    frontend.open()
    frontend.open_workflow(DEMO)
    # Long enough for a hand to reach the button.
    frontend.set_widgets("Wan21TPUSampler", num_frames=49, num_inference_steps=100)
    prompt = frontend.run()
    frontend.node_text(r"step [1-9]\d*/100").wait_for(timeout=RUN_MS)
    frontend.cancel()
    assert frontend.outcome(prompt) == "execution_interrupted"
    frontend.node_text(r"cancelled after \d").wait_for()

    frontend.set_widgets("Wan21TPUSampler", num_frames=17, num_inference_steps=2)
    assert frontend.outcome(frontend.run()) == "execution_success"
    frontend.page.locator("video").wait_for()


def test_the_texts_on_nodes_are_in_the_users_language(frontend: Frontend) -> None:
    frontend.open(Locale="zh")
    frontend.open_workflow(DEMO)
    frontend.set_widgets("Wan21TPUSampler", seed=77, num_inference_steps=30)
    prompt = frontend.run()
    frontend.node_text(r"64×64，17 帧 · 第 \d+/30 步").wait_for(timeout=RUN_MS)
    assert frontend.outcome(prompt) == "execution_success"
    frontend.node_text("demo 只能生成 64×64").wait_for()
    assert frontend.node_text(r"已完成，用时 \d+\.\d 秒").count() >= 2
    frontend.page.evaluate("app.extensionManager.setting.set('Comfy.Locale', 'en')")
    frontend.node_text(r"done in \d+\.\d s").first.wait_for()


def test_an_error_of_a_node_is_one_readable_sentence(frontend: Frontend) -> None:
    frontend.open()
    frontend.open_workflow(
        {
            "1": {"class_type": "ProbeInteger", "inputs": {"value": 18}},
            "2": {
                "class_type": "Wan21TextEncoder",
                "inputs": {"prompt": "a red circle", "negative_prompt": "", "model_id": "demo"},
            },
            "3": {
                "class_type": "Wan21TPUSampler",
                "inputs": SETTINGS
                | {
                    "prompt_embeds": ["2", 0],
                    "negative_prompt_embeds": ["2", 1],
                    "num_frames": ["1", 0],
                },
            },
            "4": {"class_type": "ProbeKeep", "inputs": {"value": ["3", 0], "name": "never"}},
        }
    )
    assert frontend.outcome(frontend.run()) == "execution_error"
    shown = frontend.open_error()
    shown.get_by_text("num_frames=18 is not 4n+1; use 17 or 21").first.wait_for()


def test_a_model_that_is_not_there_is_refused_before_anything_runs(frontend: Frontend) -> None:
    frontend.open()
    frontend.open_workflow(DEMO)
    frontend.set_widgets("Wan21TextEncoder", model_id="../../somewhere")
    with frontend.page.expect_response(lambda reply: reply.url.endswith("/api/prompt")) as info:
        frontend.press_run()
    assert info.value.status == 400
    refused = re.compile("Value not in list: model_id|model_id is not available")
    frontend.page.get_by_text(refused).first.wait_for()
