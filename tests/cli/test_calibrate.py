"""comfy-tpu calibrate, with a pipeline of milliseconds."""

import json
from pathlib import Path

import pytest

from comfy_tpu.cli import main as cli
from comfy_tpu.pipeline import calibration, video
from tests.cli.fake_pipeline import FakePipeline


@pytest.fixture
def directory(monkeypatch, tmp_path):
    """The current one, with a model in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(video, "VideoPipeline", FakePipeline)
    Path("demo").mkdir()
    return tmp_path


def test_the_curve_goes_into_the_model(directory, capsys):
    flags = ["--prompt", "a", "--prompt", "b", "--steps", "3", "--seed", "5"]
    assert cli.main(["calibrate", "demo", *flags]) == 0
    assert capsys.readouterr().out == "demo/reuse.json\n"
    document = json.loads(Path("demo/reuse.json").read_text())
    assert document["family"] == "Fake"
    assert document["fingerprint"] == "ab12"
    assert document["sigmas"] == [1.0, 0.66667, 0.33333]
    assert document["ratios"] == [1.0, 0.5, 0.5]
    assert document["changes"] == [0.0, 0.0, 0.0]
    made_with = document["made_with"]
    assert made_with["prompts"] == ["a", "b"]
    assert (made_with["num_inference_steps"], made_with["seed"]) == (3, 5)


def test_it_has_prompts_of_its_own(directory, capsys):
    assert cli.main(["calibrate", "demo", "-o", "x.json"]) == 0
    assert json.loads(Path("x.json").read_text())["made_with"]["prompts"] == list(calibration.PROMPTS)
    assert list(Path("demo").iterdir()) == []


REFUSED = {
    "model": (["nowhere"], "--model nowhere is not a directory"),
    "one step": (["demo", "--steps", "1"], "--steps 1 leaves nothing to compare; give 2 or more, better 50"),
    "empty prompt": (["demo", "--prompt", ""], "PROMPT '' is empty; say what the video should show"),
    "no place": (["demo", "-o", "a/b/x.json"], "--output a/b/x.json is in a/b, and there is no a"),
}


@pytest.mark.parametrize(("argv", "text"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_one_line_and_status_1(argv, text, directory, capsys):
    assert cli.main(["calibrate", *argv]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"comfy-tpu: {text}")
    assert err.count("\n") == 1
    assert list(Path("demo").iterdir()) == []
