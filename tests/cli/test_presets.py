"""--preset, in every command that has it: its values, what goes before them, and what is said of a wrong one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from comfy_tpu.cli import main as cli
from comfy_tpu.cli.batch import parse_values
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.pipeline import media, video
from tests.cli.fake_pipeline import FakePipeline

PROMPT = "a red circle moving left"


@pytest.fixture(autouse=True)
def _fake(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(video, "VideoPipeline", FakePipeline)


def run(capsys, *argv):
    capsys.readouterr()
    return cli.main(list(argv)), *capsys.readouterr()


def settings_of(capsys, *argv):
    status, out, err = run(capsys, *argv, "--json")
    assert (status, err) == (0, "")
    document = json.loads(out)
    names = ("num_inference_steps", "guidance_scale", "scheduler", "flow_shift", "height")
    return document["preset"], [document["settings"][name] for name in names]


def test_one_word_sets_them_all_and_a_flag_goes_before_it(capsys):
    generate = ("generate", PROMPT, "--output", "x.npy")
    assert settings_of(capsys, *generate) == (None, [4, 5.0, "unipc", 5.0, 32])
    assert settings_of(capsys, *generate, "--preset", "4step") == ("4step", [4, 1.0, "euler", 7.0, 32])
    flags = ("--steps", "6", "--flow-shift", "2")
    assert settings_of(capsys, *generate, "--preset", "4step", *flags) == ("4step", [6, 1.0, "euler", 2.0, 32])


def test_a_presets_shift_goes_before_that_of_a_size(capsys):
    chosen = ("generate", PROMPT, "--output", "x.npy", "--size", "480p")
    assert settings_of(capsys, *chosen) == (None, [4, 5.0, "unipc", 3.0, 32])
    assert settings_of(capsys, *chosen, "--preset", "4step") == ("4step", [4, 1.0, "euler", 7.0, 32])


def test_the_video_says_which_it_was(capsys):
    assert run(capsys, "generate", PROMPT, "--output", "x.mp4", "--preset", "4step")[0] == 0
    assert media.read_metadata("x.mp4")["preset"] == "4step"
    assert run(capsys, "generate", PROMPT, "--output", "y.mp4")[0] == 0
    assert "preset" not in media.read_metadata("y.mp4")


def test_the_next_stage_goes_on_with_the_preset_of_its_text(capsys):
    """With its LoRA, which is why it must know; but with the steps that were chosen beside it."""
    assert run(capsys, "encode", PROMPT, "--preset", "4step", "--steps", "6")[0] == 0
    assert settings_of(capsys, "denoise", "text.safetensors") == ("4step", [6, 1.0, "euler", 7.0, 32])
    again = ("denoise", "text.safetensors", "--force", "--preset", "4step")
    assert settings_of(capsys, *again) == ("4step", [4, 1.0, "euler", 7.0, 32])
    assert settings_of(capsys, "decode", "latents.safetensors", "-o", "x.npy")[1][0] == 4
    assert run(capsys, "encode", PROMPT, "--preset", "4step", "--steps", "6")[2].startswith(
        "comfy-tpu: text.safetensors is there already"
    )


def test_a_wrong_name_is_one_line(capsys):
    status, out, err = run(capsys, "generate", PROMPT, "--preset", "9step")
    assert (status, out) == (1, "")
    assert err == "comfy-tpu: --preset 9step is unknown for model demo; choose from 4step, or auto\n"
    assert not list(Path().iterdir())


def test_sigmas_are_a_flag(capsys):
    status, _, err = run(capsys, "generate", PROMPT, "--sigmas", "1,2", "--scheduler", "euler")
    assert (status, err.split(";")[0]) == (1, "comfy-tpu: --sigmas '1,2' are not noise levels")
    chosen = ("generate", PROMPT, "--output", "x.npy", "--sigmas", "1,0.5", "--scheduler", "euler")
    assert settings_of(capsys, *chosen)[1][0] == 2


def test_a_line_of_a_batch_has_it_as_a_key():
    request = parse_values({"prompt": PROMPT, "preset": "4step", "seed": 7}, common={})
    assert request.values["preset"] == "4step"
    assert request.shape_key != parse_values({"prompt": PROMPT, "seed": 7}, common={}).shape_key
    assert parse_values({"prompt": PROMPT}, common={"preset": "auto"}).values["preset"] == "auto"
    with pytest.raises(InvalidValueError, match="preset is a list"):
        parse_values({"prompt": PROMPT, "preset": ["4step"]}, common={})
