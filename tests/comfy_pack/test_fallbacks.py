"""The record of what ran on the host. Needs no ComfyUI."""

import pytest

from comfy_tpu.comfy.fallbacks import Fallbacks, NodeRun, shorten_reason
from comfy_tpu.comfy.status import Status
from comfy_tpu.errors import see

FIRST, SECOND = NodeRun("5", "first prompt"), NodeRun("5", "second prompt")


def test_a_reason_is_kept_with_its_node_and_is_news_once() -> None:
    fallbacks = Fallbacks()
    assert fallbacks.record(FIRST, "UNetModel", "a hook", compile_node="3")
    assert not fallbacks.record(FIRST, "UNetModel", "a hook", compile_node="3")
    assert fallbacks.as_list() == [
        {"node": "5", "compile_node": "3", "what": "UNetModel", "reason": "a hook", "number": 1}
    ]


def test_another_reason_replaces_the_first() -> None:
    fallbacks = Fallbacks()
    fallbacks.record(FIRST, "UNetModel", "a hook")
    assert fallbacks.record(FIRST, "UNetModel", "another")
    assert [(entry["reason"], entry["number"]) for entry in fallbacks.as_list()] == [("another", 2)]


def test_the_same_node_on_the_devices_again_clears_it() -> None:
    fallbacks = Fallbacks()
    fallbacks.record(FIRST, "UNetModel", "a hook")
    assert not fallbacks.clear(FIRST, "UNetModel"), "another call of the same run"
    assert not fallbacks.clear(NodeRun("6", "second prompt"), "UNetModel"), "another node"
    assert not fallbacks.clear(SECOND, "AutoencoderKL"), "another module"
    assert len(fallbacks.as_list()) == 1
    assert fallbacks.clear(SECOND, "UNetModel")
    assert fallbacks.as_list() == []


def test_a_second_run_on_the_host_is_news_again() -> None:
    """The page took the badge off when the node began to run."""
    fallbacks = Fallbacks()
    fallbacks.record(FIRST, "UNetModel", "a hook")
    assert fallbacks.record(SECOND, "UNetModel", "a hook")
    assert [entry["number"] for entry in fallbacks.as_list()] == [2]


def test_a_session_does_not_fill_the_memory() -> None:
    fallbacks = Fallbacks()
    for node in range(100):
        fallbacks.record(NodeRun(str(node), "a prompt"), "UNetModel", "a hook")
    assert [entry["node"] for entry in fallbacks.as_list()] == [str(node) for node in range(68, 100)]


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        (
            f"it failed at /home/me/ComfyUI/comfy/model.py:12 in forward{see('trace')}",
            "it failed at model.py:12 in forward",
        ),
        (r"it failed at C:\Users\me\pack\nodes.py:3", "it failed at nodes.py:3"),
        ("transformer_options hold a/b and 1/2", "transformer_options hold a/b and 1/2"),
        ("two\n  lines", "two lines"),
        ("x" * 1000, "x" * 299 + "…"),
    ],
)
def test_a_reason_is_one_line_without_directories(reason: str, shown: str) -> None:
    assert shorten_reason(reason) == shown


def test_it_is_part_of_the_status() -> None:
    status = Status()
    status.fallbacks.record(FIRST, "UNetModel", "a hook")
    (entry,) = status.snapshot()["fallbacks"]
    assert (entry["node"], entry["reason"]) == ("5", "a hook")
    status.start()
    assert status.report().splitlines()[-1] == "on the host: UNetModel (node 5): a hook"
