"""comfy-tpu calibrate, with a pipeline of milliseconds."""

import json
from pathlib import Path

import pytest
from PIL import Image

from comfy_tpu.cli import main as cli
from comfy_tpu.pipeline import calibration, video
from comfy_tpu.pipeline.images import fingerprint, read_image
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


def test_images_go_to_every_prompt_and_are_noted(directory, capsys, monkeypatch):
    Image.new("RGB", (8, 8), "red").save("first.png")
    given = []
    encode = FakePipeline.encode

    def recording(self, prompt, settings, media):
        given.append([image.size for image in media.images])
        return encode(self, prompt, settings, media)

    monkeypatch.setattr(FakePipeline, "encode", recording)
    flags = ["--prompt", "a", "--prompt", "b", "--steps", "3", "-o", "x.json"]
    assert cli.main(["calibrate", "demo", *flags, "--image", "first.png"]) == 0
    assert given == [[(8, 8)], [(8, 8)]]
    noted = json.loads(Path("x.json").read_text())["made_with"]["pictures"]
    assert noted == fingerprint([read_image(Path("first.png"))])
    assert cli.main(["calibrate", "demo", *flags]) == 0
    assert "pictures" not in json.loads(Path("x.json").read_text())["made_with"]


def test_a_model_that_begins_with_an_image_asks_for_a_flag_that_there_is(tmp_path, capsys):
    """The real model: refused before anything is loaded."""
    assert (
        cli.main(["calibrate", "demo-image", "--mesh", "single", "--steps", "2", "-o", str(tmp_path / "x.json")]) == 1
    )
    assert "--image is missing: model demo-image begins with an image; give one" in capsys.readouterr().err


REFUSED = {
    "model": (["nowhere"], "MODEL nowhere is not a directory"),
    "one step": (["demo", "--steps", "1"], "--steps 1 leaves nothing to compare; give 2 or more, better 50"),
    "empty prompt": (["demo", "--prompt", ""], "--prompt '' is empty; say what the video should show"),
    "not UTF-8": (["demo", "--prompt", "caf\udce9"], "--prompt is not UTF-8 text"),
    "negative prompt": (["demo", "--negative-prompt", "caf\udce9"], "--negative-prompt is not UTF-8 text"),
    "no image": (["demo", "--image", "none.png"], "--image none.png is not a file; give an image such as first.png"),
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
