"""Previews of a video move between two steps, and nothing is sent when the node has ended. Needs no ComfyUI."""

import threading

import pytest

from comfy_tpu.comfy import preview_loop
from comfy_tpu.comfy.preview_loop import PreviewLoop


class Sent(list[str]):
    """What was sent; `wait` returns once there are so many."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = threading.Condition()

    def __call__(self, frame: str) -> None:
        with self._condition:
            self.append(frame)
            self._condition.notify_all()

    def wait(self, count: int) -> None:
        with self._condition:
            assert self._condition.wait_for(lambda: len(self) >= count, timeout=60)


def test_frames_are_sent_in_turn_and_the_next_step_goes_on_where_the_last_was() -> None:
    sent = Sent()
    loop = PreviewLoop(sent, rate=20)
    assert loop.replace(["a0", "a1", "a2"]) == "a0"
    sent.wait(2)
    shown = loop.replace(["b0", "b1", "b2"])
    before = list(sent)
    assert before == (["a1", "a2", "a0"] * 3)[: len(before)]
    assert shown == before[-1].replace("a", "b")
    sent.wait(len(before) + 2)
    loop.close()
    assert set(sent[len(before) :]) <= {"b0", "b1", "b2"}


def test_nothing_is_sent_after_the_end() -> None:
    sent = Sent()
    loop = PreviewLoop(sent, rate=1000)
    loop.replace(["a0", "a1"])
    loop.close()
    count = len(sent)
    assert not any(thread.name == "comfy-tpu previews" for thread in threading.enumerate())
    assert len(sent) == count


def test_a_long_step_does_not_fill_the_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preview_loop, "_MAX_PLAYS", 2)
    sent = Sent()
    loop = PreviewLoop(sent, rate=1000)
    loop.replace(["a0", "a1", "a2"])
    sent.wait(6)
    loop._closed.wait(0.05)
    loop.close()
    assert sent == ["a1", "a2", "a0"] * 2


def test_an_image_needs_no_thread() -> None:
    loop = PreviewLoop(Sent(), rate=1000)
    assert loop.replace(["a0"]) == "a0"
    assert loop._thread is None
    loop.close()
