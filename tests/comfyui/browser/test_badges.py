"""A model that runs on the host wears the reason: on the node that ran it, and on the node that was to compile it."""

import pytest

from tests.comfyui.browser.frontend import Frontend
from tests.comfyui.client import Prompt
from tests.comfyui.graphs import keep
from tests.comfyui.test_native_nodes import compiled, with_model_node

pytestmark = pytest.mark.comfyui

# The text of each badge, by the type of its node. A badge may be a function that makes it.
BADGES = """() => Object.fromEntries(app.graph.nodes.map((node) => [
  node.type,
  (node.badges ?? []).map((badge) => (typeof badge === "function" ? badge() : badge)?.text ?? "")
    .filter((text) => text.startsWith("on the host: ") || text.startsWith("在主机上运行：")),
]).filter(([, texts]) => texts.length))"""


def numbered(prompt: Prompt) -> Prompt:
    """With numbers for ids, as a graph on the canvas has them."""
    numbers = {name: str(number) for number, name in enumerate(prompt, 1)}

    def rename(value: object) -> object:
        return [numbers[value[0]], value[1]] if isinstance(value, list) and value and value[0] in numbers else value

    return {
        numbers[name]: {**node, "inputs": {key: rename(value) for key, value in node["inputs"].items()}}
        for name, node in prompt.items()
    }


def wait_for_badges(frontend: Frontend, beginning: str, types: set[str]) -> None:
    expected = sorted(types)
    frontend.page.wait_for_function(
        f"""([beginning, types]) => {{
          const badges = ({BADGES})()
          return JSON.stringify(Object.keys(badges).sort()) === JSON.stringify(types)
            && Object.values(badges).flat().every((text) => text.startsWith(beginning))
        }}""",
        arg=[beginning, expected],
    )


def test_a_badge_says_why_and_goes_when_the_node_runs_on_the_devices_again(frontend: Frontend) -> None:
    frontend.open()
    prompt = with_model_node(compiled(steps=2, seed=41), "NativeStepPatch", reads_sigmas=True)
    frontend.open_workflow(numbered(keep(prompt, badge=["ksampler", 0])))
    assert frontend.outcome(frontend.run()) == "execution_success"
    wait_for_badges(frontend, "on the host: ", {"KSampler", "TPUCompileModel"})
    (text,) = {text for texts in frontend.page.evaluate(BADGES).values() for text in texts}
    assert text.startswith("on the host: a patch of the model")

    frontend.page.evaluate("app.extensionManager.setting.set('Comfy.Locale', 'zh')")
    wait_for_badges(frontend, "在主机上运行：", {"KSampler", "TPUCompileModel"})

    frontend.set_widgets("NativeStepPatch", reads_sigmas=False)
    assert frontend.outcome(frontend.run()) == "execution_success"
    wait_for_badges(frontend, "", set())
