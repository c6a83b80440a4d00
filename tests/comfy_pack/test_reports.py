"""However a run ends, the text on its node says so, and the panel shows no activity; previews of videos move.

Needs no ComfyUI."""

import re

import pytest

from tests.comfy_pack.loading import run_script


@pytest.fixture(scope="module")
def ends():
    return run_script("run_reports.py")


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("done", r"done in \d+\.\d s"),
        ("cancelled", r"cancelled after \d+\.\d s"),
        ("failed", r"failed after \d+\.\d s"),
        ("not opened", r"failed after \d+\.\d s"),
    ],
)
def test_the_text_of_a_family_node_ends_in_a_finished_state(case, text, ends):
    end = ends["family"][case]
    assert re.fullmatch(text, end["texts"][-1])
    assert case == "not opened" or end["texts"][-2] == "64×64, 17 frames · step 0/4"
    assert end["stage"] == "idle"


@pytest.mark.parametrize(
    ("case", "text", "raised"),
    [
        ("cancelled", r"cancelled after \d+\.\d s", "InterruptProcessingException"),
        ("out of memory", r"failed after \d+\.\d s", "OutOfMemory"),
        ("on the host", "", "TraceError"),
        ("failed", "", "RuntimeError"),  # the host runs it then, too
    ],
)
def test_the_text_of_a_node_of_comfyui_ends_too(case, text, raised, ends):
    end = ends["native"][case]
    assert end["texts"][0] == "compiling (first run at 512 tokens)"
    assert re.fullmatch(text, end["texts"][-1])
    assert end["raised"] == raised
    assert end["stage"] == "idle"


def test_every_frame_of_a_video_is_previewed_in_turn(ends):
    """The step shows one, and the others follow at the video's pace, on the same node."""
    image = ["JPEG", [1, 1, 1, 1, 1]]
    assert ends["previews"]["colours"]["bar"] == [[*image, 0]]
    assert ends["previews"]["colours"]["sent"] == [["7", [*image, frame]] for frame in (1, 2, 0)]


def test_a_previewer_that_costs_time_is_asked_once(ends):
    """TAESD and the like, and those of other node packs, which see all frames."""
    assert ends["previews"]["network"] == {"bar": [["JPEG", [1, 1, 3, 1, 1], 0]], "sent": []}


def test_colours_of_other_channels_show_nothing(ends):
    for which in ("other channels", "not to be reshaped"):
        assert ends["previews"][which] == {"bar": [None], "sent": []}
    assert ends["previews"]["reshaped"] == ends["previews"]["colours"]
