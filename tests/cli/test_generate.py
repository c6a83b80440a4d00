"""The commands that make videos, with a pipeline of milliseconds."""

import dataclasses
import io
import json
import logging
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from comfy_tpu.cli import main as cli
from comfy_tpu.cli import options
from comfy_tpu.cli.progress import StageTimes, format_spans
from comfy_tpu.config import FAST, AttentionConfig, BlockSizes, GenerationSettings, Lora, TileWindow
from comfy_tpu.errors import CheckpointError, rename_as_flag
from comfy_tpu.jobs.request import parse_lora
from comfy_tpu.pipeline import artifacts, media, video
from comfy_tpu.pipeline.progress import Progress
from tests.cli.fake_pipeline import FakePipeline

ROOT = Path(__file__).parents[2]
PROMPT = "a red circle moving left"


@pytest.fixture
def opened(monkeypatch, tmp_path):
    """In an empty directory, with the fake pipeline; the ones that were opened."""
    monkeypatch.chdir(tmp_path)
    pipelines = []

    class Remembered(FakePipeline):
        @classmethod
        def open(cls, *arguments, **more):
            pipelines.append(super().open(*arguments, **more))
            return pipelines[-1]

    monkeypatch.setattr(video, "VideoPipeline", Remembered)
    return pipelines


def run(capsys, *argv):
    """Status, stdout, stderr."""
    capsys.readouterr()
    return cli.main(list(argv)), *capsys.readouterr()


def files():
    return sorted(str(path) for path in Path().rglob("*"))


@pytest.fixture
def not_downloaded(monkeypatch, tmp_path):
    """A published model that is not on this machine, in a directory with an image."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("comfy_tpu.pipeline.model_files._find_download", lambda model: None)
    Image.new("RGB", (64, 64)).save("image.png")
    return "Wan-AI/Wan2.1-VACE-1.3B-diffusers"


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (["--num-frames", "18"], "--num-frames 18"),
        (["--preset", "nonsense"], "--preset nonsense"),
        (["--mask", "image.png"], "--mask"),
        (["--last-image", "image.png", "--reference", "image.png"], "--last-image"),
        (["--size", "720P", "--tile", "640x368", "--reference", "image.png"], "--tile 640x368 shows a part"),
        (["--size", "480P", "--tile", "832x480", "--upscale", "2", "--reference", "image.png"], "--tile 832x480 shows"),
        (["--tile", "480P"], "--tile '480P' is no size of tiles"),
    ],
    ids=["frames", "preset", "mask alone", "last image beside a reference", "tiles", "tiles of a second pass", "tile"],
)
def test_a_request_is_refused_before_its_model_is_downloaded(monkeypatch, capsys, not_downloaded, wanted, said):
    monkeypatch.setattr(video.VideoPipeline, "open", lambda *arguments, **more: pytest.fail("it was downloaded"))
    status, _, stderr = run(capsys, "generate", PROMPT, "--model", not_downloaded, *wanted)
    assert status == 1
    assert said in stderr
    assert len(stderr.splitlines()) == 1
    assert files() == ["image.png"]


def test_a_request_without_a_fault_downloads_its_model(monkeypatch, capsys, not_downloaded):
    def download(model, *arguments, **more):
        raise CheckpointError(f"{model} would be downloaded")

    monkeypatch.setattr(video.VideoPipeline, "open", download)
    status, _, stderr = run(capsys, "generate", PROMPT, "--model", not_downloaded, "--reference", "image.png")
    assert (status, stderr) == (1, f"comfy-tpu: {not_downloaded} would be downloaded\n")


def test_settings_are_refused_before_a_device_is_started(monkeypatch, capsys):
    monkeypatch.setattr(video, "make_placement", lambda *arguments, **more: pytest.fail("devices were started"))
    assert run(capsys, "generate", PROMPT, "--reuse", "2") == (
        1,
        "",
        "comfy-tpu: --reuse 2.0 is not a number from 0 to 1\n",
    )
    assert run(capsys, "generate", PROMPT, "--vae-backend", "flax") == (
        1,
        "",
        "comfy-tpu: --vae-backend 'flax' is unknown; choose from torchax, nnx, tiny\n",
    )


def test_generate(opened, capsys):
    assert run(capsys, "generate", PROMPT, "--output", "x.mp4") == (0, "x.mp4\n", "")
    assert files() == ["x.mp4"]
    metadata = media.read_metadata("x.mp4")
    assert (metadata["prompt"], metadata["seed"], metadata["model"]) == (PROMPT, "2025", "demo")
    assert json.loads(metadata["settings"]) == dataclasses.asdict(opened[0].settings())
    assert opened[0].ran == ["encode", "denoise", "decode"]


def test_every_flag_arrives(opened, capsys):
    flags = (
        "--negative-prompt blue --height 48 --width 80 --num-frames 5 --steps 2 --guidance-scale 3 --flow-shift 2.5 "
        "--seed 7 --scheduler euler --num-videos 2 --fps 8 --model other --mesh dp=2 --platform cpu --dtype float32 "
        "--reuse 0.12 --guidance-until 0.5 --quantize int8 --vae-backend nnx --cache-dir c --output x.npy --json "
        "--attention chunked --attention-window 2x4x4:3x3x3 --attention-blocks 256,256,128 --dense-max-tokens 64"
    )
    status, out, err = run(capsys, "generate", PROMPT, *flags.split())
    assert (status, err) == (0, "")
    document = json.loads(out)
    expected = GenerationSettings(48, 80, 5, 2, 3.0, 2.5, 7, "euler", "blue", 2, 8, reuse=0.12, guidance_until=0.5)
    windows = {"context_frames": 9, "context_overlap": 3}  # the model's own length, and three eighths of it
    assert document["settings"] == dataclasses.asdict(expected) | windows
    assert document["outputs"] == ["x-0.npy", "x-1.npy"]
    assert document["model"] == {"name": "other", "fingerprint": "cd34"}
    assert document["quantize"] == "int8"
    (pipeline,) = opened
    assert pipeline.opened_with["cache"]["directory"] == Path("c")
    names = ("mesh", "platform", "dtype", "quantize", "vae_backend")
    assert [pipeline.opened_with[name] for name in names] == ["dp=2", "cpu", "float32", "int8", "nnx"]
    attention = AttentionConfig(
        "chunked",
        block_sizes=BlockSizes(256, 256, 128),
        dense_max_tokens=64,
        window=TileWindow((2, 4, 4), (3, 3, 3)),
    )
    assert pipeline.opened_with["attention"] == dataclasses.asdict(attention)
    assert np.load("x-1.npy").shape == (5, 48, 80, 3)


def test_tiny_vae(opened, capsys):
    assert run(capsys, "generate", PROMPT, "--vae", "tiny", "--tiny-vae", "t.safetensors", "--output", "x.mp4")[0] == 0
    assert (opened[0].opened_with["vae_backend"], opened[0].opened_with["tiny_vae"]) == ("tiny", Path("t.safetensors"))
    assert opened[0].model_name == "demo", "tiny is no file of the model"
    type(opened[0]).tiny_vae = "ab"
    try:
        assert run(capsys, "encode", PROMPT)[0] == run(capsys, "denoise", "text.safetensors")[0] == 0
        assert run(capsys, "decode", "latents.safetensors", "-o", "y.mp4")[0] == 0
        assert media.read_metadata("y.mp4")["tiny_vae"] == "ab"
        assert "is there already" in run(capsys, "decode", "latents.safetensors", "-o", "y.mp4")[2]
        type(opened[0]).tiny_vae = ""
        assert "is there already" not in run(capsys, "decode", "latents.safetensors", "-o", "y.mp4")[2]
    finally:
        type(opened[0]).tiny_vae = ""


def test_a_preview_that_cannot_be_written(opened, capsys):
    assert run(capsys, "generate", PROMPT, "--preview", "x.bmp") == (
        1,
        "",
        "comfy-tpu: --preview x.bmp is no image; give it a name in .png, .jpg, .jpeg, .gif, .webp\n",
    )
    status, _, error = run(capsys, "generate", PROMPT, "--preview", "x.png", "--output", "x.png")
    assert (status, opened) == (1, [])
    assert "x.png" in error


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        (
            "--attention",
            "flash",
            "--attention 'flash' is unknown; choose from auto, splash, hopper, cudnn, chunked, int8",
        ),
        (
            "--attention-window",
            "4x16x16",
            "--attention-window '4x16x16' is no window; write full, video, tokens before and after as 2048,2048, or "
            "frames×rows×columns of a tile and of the window in tiles as 4x16x16:3x3x3",
        ),
        (
            "--attention-window",
            "2x8x2:1x1x1",
            "--attention-window 2x8x2:1x1x1: a tile of 8 rows does not fit into the video's 4 (its tokens are 5×4×4); "
            "choose at most 4",
        ),
        (
            "--attention-blocks",
            "2048",
            "--attention-blocks '2048' are no block sizes; write auto, or rows of queries, of keys, and of keys "
            "computed at a time as 2048,2048,1024",
        ),
        (
            "--attention-blocks",
            "200,256,128",
            "--attention-blocks 200,256,128 is not a possible tile; query, key and key_compute must be multiples of "
            "128 and key a multiple of key_compute; choose for example 2048,2048,1024",
        ),
        ("--dense-max-tokens", "many", "--dense-max-tokens 'many' is not a whole number from 1"),
    ],
)
def test_attention_that_cannot_work_is_refused_in_one_sentence(flag, value, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "generate", PROMPT, flag, value) == (1, "", f"comfy-tpu: {message}\n")
    assert files() == []


@pytest.mark.parametrize("flags", [("--attention-window", "2x4x4:3x3x3"), ("--quantize", "int8")], ids=str)
def test_latents_of_another_window_or_precision_are_made_again(flags, opened, capsys):
    assert run(capsys, "encode", PROMPT)[0] == 0
    commands = [("denoise", "text.safetensors"), ("decode", "latents.safetensors")]
    ran = []
    for chosen in ((), (), flags, flags):
        for command, path in commands:
            status, _, _ = run(capsys, command, path, *(chosen if command == "denoise" else ()))
            assert status == 0
        ran.append([pipeline.ran for pipeline in opened[-2:]])
    made, kept = [["denoise"], ["decode"]], [[], []]
    assert ran == [made, kept, made, kept]


def test_text_is_the_same_in_every_precision_of_the_transformer(opened, capsys):
    for flags in ((), ("--quantize", "int8"), ("--quantize", "int8")):
        assert run(capsys, "encode", PROMPT, *flags)[0] == 0
    assert [pipeline.ran for pipeline in opened] == [["encode"], [], []]


def test_fast(opened, capsys):
    _, out, _ = run(capsys, "generate", PROMPT, "-o", "x.gif", "--json", "--fast", "--guidance-until", "0.9")
    settings = json.loads(out)["settings"]
    assert (settings["reuse"], settings["guidance_until"]) == (FAST.reuse, 0.9)
    assert run(capsys, "generate", PROMPT, "-o", "y.gif", "--fast", "--quantize", "none")[0] == 0
    presets = [(pipeline.opened_with["fast"], pipeline.opened_with["quantize"]) for pipeline in opened]
    assert presets == [(dataclasses.asdict(FAST), None), (dataclasses.asdict(FAST), "none")]


def test_fast_is_a_choice_of_the_stage_that_denoises(opened, capsys):
    """Its values go before those of the text's file, and are found in that of the latents."""
    run(capsys, "encode", PROMPT, "--reuse", "0.5")
    found = []
    for flags in ((), ("--fast",), ("--fast", "--reuse", "0")):
        assert run(capsys, "denoise", "text.safetensors", *flags)[0] == 0
        settings = artifacts.read_header(Path("latents.safetensors"), "latents").settings
        found.append((settings.reuse, settings.guidance_until))
    assert found == [(0.5, 1.0), (FAST.reuse, FAST.guidance_until), (0.0, FAST.guidance_until)]


def test_fast_takes_no_value(capsys):
    with pytest.raises(SystemExit):
        cli.main(["generate", PROMPT, "--fast=0.5"])
    assert "--fast: ignored explicit argument '0.5'" in capsys.readouterr().err


def test_every_setting_has_a_flag():
    """All but the length the text is padded to, which is the model's."""
    fields = {field.name for field in dataclasses.fields(GenerationSettings)}
    assert {option.field for option in options.SETTINGS} == fields - {"max_sequence_length"}


def test_size_by_name(opened, capsys):
    _, out, _ = run(capsys, "generate", PROMPT, "--size", "480p", "--width", "64", "-o", "x.gif", "--json")
    settings = json.loads(out)["settings"]
    assert (settings["height"], settings["width"], settings["flow_shift"]) == (32, 64, 3.0)


def test_json_says_where_the_time_went_and_nothing_else(opened, capsys):
    status, out, err = run(capsys, "generate", PROMPT, "-o", "x.gif", "--json", "--contact-sheet", "sheet.png")
    assert (status, err) == (0, "")
    document = json.loads(out)
    assert set(document) == {
        *("schema", "outputs", "skipped", "prompt", "prompt_cut", "seed", "settings", "model", "seconds", "programs"),
        *("reused", "resumed_after", "loras", "preset", "quantize", "profile", "dump"),
    }
    assert document["reused"] == []
    assert (document["prompt"], document["prompt_cut"], document["seed"]) == (PROMPT, "", 2025)
    assert set(document["seconds"]) == {"loading", "compiling", "denoising", "decoding", "other", "total"}
    parts = [seconds for stage, seconds in document["seconds"].items() if stage != "total"]
    assert sum(parts) == pytest.approx(document["seconds"]["total"])
    programs = [(program["what"], program["from_cache"]) for program in document["programs"]]
    assert programs == [
        ("text_encoder at 512 tokens", False),
        ("transformer at 64×32×9", False),
        ("vae at 64×32×9", True),
    ]
    assert files() == ["sheet.png", "x.gif"]


def test_reused_steps_are_reported(opened, capsys):
    _, out, _ = run(capsys, "generate", PROMPT, "--steps", "6", "--reuse", "0.12", "-o", "x.gif", "--json")
    assert json.loads(out)["reused"] == [2, 3, 4, 5]


def test_reuse_is_a_setting_of_the_latents(opened, capsys):
    run(capsys, "encode", PROMPT)
    run(capsys, "denoise", "text.safetensors")
    run(capsys, "denoise", "text.safetensors", "--reuse", "0.12")
    assert opened[-1].ran == ["denoise"]
    _, header = artifacts.load_latents(Path("latents.safetensors"), opened[-1])
    assert header.settings.reuse == 0.12
    assert run(capsys, "decode", "latents.safetensors")[0] == 0


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [([11], "11"), ([11, 13, 15, 16], "11, 13, 15–16"), ([1, 2, 4, 6, 8, 9], "… 4, 6, 8–9")],
)
def test_a_bar_names_the_last_reused_steps(numbers, shown):
    assert format_spans(numbers) == shown


LORAS = {
    "a/style.safetensors": ("a/style.safetensors", 1.0, "auto"),
    "style.safetensors:0.8": ("style.safetensors", 0.8, "auto"),
    "style.safetensors:-1": ("style.safetensors", -1.0, "auto"),
    "odd:name.safetensors:.5": ("odd:name.safetensors", 0.5, "auto"),
    "odd:name.safetensors": ("odd:name.safetensors", 1.0, "auto"),
    "style.safetensors:strong": ("style.safetensors", "strong", "auto"),
    "style.safetensors:": ("style.safetensors", "", "auto"),
    "style.safetensors:0.8:high": ("style.safetensors", 0.8, "high"),
    "odd:name.safetensors:low": ("odd:name.safetensors", 1.0, "low"),
    "style.safetensors:high:0.8": ("style.safetensors", 0.8, "high"),
    "style.safetensors:high:low": ("style.safetensors", "high", "low"),
    "style.safetensors:strong:low": ("style.safetensors", "strong", "low"),
}


@pytest.mark.parametrize("text", LORAS)
def test_lora_and_its_strength(text):
    lora = parse_lora(text)
    assert (str(lora.path), lora.strength, lora.noise) == LORAS[text]


def test_a_file_whose_name_ends_like_a_strength(tmp_path):
    path = tmp_path / "style:2"
    path.touch()
    assert parse_lora(str(path)) == Lora(path, 1.0)


def test_loras_are_recorded_and_another_one_is_another_video(opened, capsys):
    run(capsys, "encode", PROMPT, "-o", "t.safetensors")
    denoise = ("denoise", "t.safetensors", "-o", "l.safetensors", "--json", "--lora", "a.safetensors:0.5", "--lora")
    notes = [
        {"name": name, "fingerprint": "ef56", "strength": s}
        for name, s in (("a.safetensors", 0.5), ("b.safetensors", 1.0))
    ]
    decode = ("decode", "l.safetensors", "-o", "x.mp4", "--json")
    for skipped in (False, True):
        document = json.loads(run(capsys, *denoise, "b.safetensors")[1])
        assert (document["loras"], document["skipped"]) == (notes, skipped)
        document = json.loads(run(capsys, *decode)[1])
        assert (document["loras"], document["skipped"]) == (notes, skipped)
    assert json.loads(artifacts.read_header(Path("l.safetensors"), "latents").loras) == notes
    assert json.loads(media.read_metadata("x.mp4")["loras"]) == notes
    assert not json.loads(run(capsys, *denoise, "b.safetensors:2")[1])["skipped"]
    assert not json.loads(run(capsys, *decode)[1])["skipped"]
    document = json.loads(run(capsys, "denoise", "t.safetensors", "-o", "l.safetensors", "--json")[1])
    assert (document["loras"], document["skipped"]) == ([], False)


def test_generate_with_a_lora(opened, capsys):
    document = json.loads(run(capsys, "generate", PROMPT, "-o", "x.mp4", "--json", "--lora", "a.safetensors:-1")[1])
    assert document["loras"] == [{"name": "a.safetensors", "fingerprint": "ef56", "strength": -1.0}]
    assert json.loads(media.read_metadata("x.mp4")["loras"]) == document["loras"]


def test_default_output_replaces_nothing(opened, capsys):
    outputs = [run(capsys, "generate", PROMPT, "--steps", "1")[1] for _ in range(3)]
    assert outputs == ["video.mp4\n", "video-1.mp4\n", "video-2.mp4\n"]


def test_prompt_from_standard_input(opened, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("ein Würfel\n".encode()), "ascii"))
    assert run(capsys, "generate", "-", "-o", "x.gif")[0] == 0
    assert media.read_metadata("x.gif")["prompt"] == "ein Würfel"


def test_long_prompt_is_cut_aloud(opened, capsys):
    status, _, err = run(capsys, "generate", "one two three four five six seven eight nine ten", "-o", "x.gif")
    assert status == 0
    assert err == "comfy-tpu: warning: PROMPT is longer than the model reads; this was cut off: nine ten\n"


def test_warnings_of_the_package_are_lines_of_the_command(opened, capsys, monkeypatch):
    logger = logging.getLogger("comfy_tpu.compiler.cache")
    monkeypatch.setattr(FakePipeline, "_begin", lambda *arguments: logger.warning("cache %s cannot be written", "c"))
    status, out, err = run(capsys, "encode", PROMPT)
    assert (status, out, err) == (0, "text.safetensors\n", "comfy-tpu: cache c cannot be written\n")
    assert logging.getLogger("comfy_tpu").handlers == []


REFUSED = {
    "height": (["--height", "100"], "--height 100 is not divisible by 16; use 96 or 112"),
    "frames": (["--num-frames", "10"], "--num-frames 10 is not 4n+1; use 9 or 13"),
    "steps": (["--steps", "0"], "--steps 0 is not allowed; give a whole number from 1 to 1000"),
    "text for a number": (["--steps", "few"], "--steps 'few' is not allowed; give a whole number from 1 to 1000"),
    "guidance": (["--guidance-scale", "nan"], "--guidance-scale nan is not a number from 0 to 100"),
    "reuse": (["--reuse", "-0.1"], "--reuse -0.1 is not a number from 0 to 1"),
    "no number for reuse": (["--reuse", "nan"], "--reuse nan is not a number from 0 to 1"),
    "too much reuse": (["--reuse", "1e9"], "--reuse 1000000000.0 is not a number from 0 to 1"),
    "a word for reuse": (["--reuse", "fast"], "--reuse 'fast' is not a number from 0 to 1"),
    "guidance share": (["--guidance-until", "1.5"], "--guidance-until 1.5 is not a number from 0 to 1"),
    "scheduler": (["--scheduler", "x"], "--scheduler 'x' is unknown; choose from unipc, euler"),
    "size": (["--size", "8K"], "--size 8K is unknown; choose from 480P"),
    "model": (["--model", "nowhere"], "--model nowhere is not a directory; give one"),
    "suffix": (["-o", "x.avi"], "--output x.avi names no format; write video.mp4, video.gif, video.npy, "),
    "no place": (["-o", "a/b/x.mp4"], "--output a/b/x.mp4 is in a/b, and there is no a; create it first"),
    "unwritable": (["-o", "/proc/x.mp4"], "--output /proc/x.mp4 cannot be written: "),
    "one image": (["-o", "x.png"], "--output x.png is one image and the video has 9 frames; write x-%04d.png"),
    "sheet": (["--contact-sheet", "x.jpg"], "--contact-sheet x.jpg is an image; give it a name in .png"),
}


@pytest.mark.parametrize(("flags", "text"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_one_line_and_status_1_before_any_work(flags, text, opened, capsys):
    status, out, err = run(capsys, "generate", PROMPT, *flags)
    assert (status, out) == (1, "")
    assert err.startswith(f"comfy-tpu: {text}")
    assert err.count("\n") == 1
    assert all(pipeline.ran == [] for pipeline in opened)
    assert files() == []


@pytest.mark.parametrize(
    ("prompt", "text"),
    [("  ", "PROMPT '  ' is empty; say what the video should show"), ("caf\udce9", "PROMPT is not UTF-8 text")],
    ids=["empty", "latin-1"],
)
def test_bad_prompts(prompt, text, opened, capsys):
    status, _, err = run(capsys, "generate", prompt)
    assert status == 1
    assert err.startswith(f"comfy-tpu: {text}")
    assert opened == []


def test_negative_prompt_that_is_not_text(opened, capsys):
    status, _, err = run(capsys, "encode", PROMPT, "--negative-prompt", "caf\udce9")
    assert status == 1
    assert err.startswith("comfy-tpu: --negative-prompt is not UTF-8 text")


def test_refused_format_is_found_before_the_model_is_opened(opened, capsys):
    run(capsys, "generate", PROMPT, "-o", "x.avi")
    assert opened == []


def test_stages_together_are_generate(opened, capsys):
    flags = ["--seed", "5", "--num-videos", "2", "--guidance-scale", "4"]
    assert run(capsys, "generate", PROMPT, *flags, "-o", "whole.npy")[0] == 0
    assert run(capsys, "encode", PROMPT, *flags) == (0, "text.safetensors\n", "")
    assert run(capsys, "denoise", "text.safetensors") == (0, "latents.safetensors\n", "")
    assert run(capsys, "decode", "latents.safetensors", "-o", "parts.npy") == (0, "parts-0.npy\nparts-1.npy\n", "")
    for index in range(2):
        assert Path(f"whole-{index}.npy").read_bytes() == Path(f"parts-{index}.npy").read_bytes()
    assert [pipeline.ran for pipeline in opened[1:]] == [["encode"], ["denoise"], ["decode"]]


def test_stages_that_are_done_are_skipped(opened, capsys):
    stages = (["encode", PROMPT], ["denoise", "text.safetensors"], ["decode", "latents.safetensors"])
    for argv in stages:
        assert run(capsys, *argv)[0] == 0
    for argv, output in zip(stages, ("text.safetensors", "latents.safetensors", "latents.mp4"), strict=True):
        before = Path(output).stat().st_mtime_ns
        status, out, err = run(capsys, *argv)
        assert (status, out) == (0, f"{output}\n")
        assert err == (
            f"comfy-tpu: {output} is there already, from the same model, prompt and settings; --force makes it again\n"
        )
        assert opened[-1].ran == []
        assert json.loads(run(capsys, *argv, "--json")[1])["skipped"] is True
        assert Path(output).stat().st_mtime_ns == before
        assert run(capsys, *argv, "--force")[2] == ""
        assert opened[-1].ran == [argv[0]]


def test_changed_settings_run_the_stage_again(opened, capsys):
    run(capsys, "encode", PROMPT)
    run(capsys, "denoise", "text.safetensors")
    run(capsys, "decode", "latents.safetensors", "-o", "out/")
    run(capsys, "denoise", "text.safetensors", "--seed", "9", "--steps", "2")
    assert opened[-1].ran == ["denoise"]
    _, header = artifacts.load_latents(Path("latents.safetensors"), opened[-1])
    assert (header.settings.seed, header.settings.num_inference_steps) == (9, 2)
    for expected in (["decode"], []):
        run(capsys, "decode", "latents.safetensors", "-o", "out/")
        assert opened[-1].ran == expected
    run(capsys, "decode", "latents.safetensors", "-o", "out/", "--fps", "4")
    assert opened[-1].ran == ["decode"]


def test_stages_use_the_model_of_their_input(opened, capsys):
    Path("other").mkdir()
    run(capsys, "encode", PROMPT, "--model", "other")
    assert run(capsys, "denoise", "text.safetensors")[0] == 0
    assert opened[-1].model_name == "other"
    status, _, err = run(capsys, "decode", "latents.safetensors", "--model", "demo")
    assert status == 1
    assert "latents.safetensors was made with model other (cd34), this is demo (ab12); run `comfy-tpu denoise`" in err
    assert opened[-1].ran == []


def test_guidance_cannot_be_added_after_encoding(opened, capsys):
    run(capsys, "encode", PROMPT, "--guidance-scale", "1")
    status, _, err = run(capsys, "denoise", "text.safetensors", "--guidance-scale", "5")
    assert (status, opened[-1].ran) == (1, [])
    assert err.startswith("comfy-tpu: --guidance-scale 5.0 needs the negative prompt, and text.safetensors was encoded")


def test_file_that_is_not_ours_is_not_replaced(opened, capsys):
    save_file({"w": torch.zeros(3)}, "model.safetensors")
    before = Path("model.safetensors").read_bytes()
    status, _, err = run(capsys, "encode", PROMPT, "-o", "model.safetensors")
    assert status == 1
    assert err.startswith("comfy-tpu: --output model.safetensors would be replaced, and is not ours (")
    assert Path("model.safetensors").read_bytes() == before
    assert run(capsys, "encode", PROMPT, "-o", "model.safetensors", "--force")[0] == 0


STAGE_ERRORS = {
    "missing": (["denoise", "none.safetensors"], "none.safetensors does not exist; make it with `comfy-tpu encode"),
    "wrong stage": (["decode", "text.safetensors"], "text.safetensors holds text, made by `comfy-tpu encode`"),
    "suffix": (["encode", PROMPT, "-o", "text.pt"], "--output text.pt is for tensors; give it a name in .safetensors"),
}


@pytest.mark.parametrize(("argv", "text"), STAGE_ERRORS.values(), ids=STAGE_ERRORS)
def test_stage_errors(argv, text, opened, capsys):
    run(capsys, "encode", PROMPT)
    status, out, err = run(capsys, *argv)
    assert (status, out) == (1, "")
    assert err.startswith(f"comfy-tpu: {text}")


def test_full_disk_is_one_line(opened, capsys, monkeypatch):
    def full(self, frame):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("comfy_tpu.pipeline.video_formats.Mp4.add", full)
    status, _, err = run(capsys, "generate", PROMPT, "-o", "x.mp4")
    assert status == 1
    assert err == (
        "comfy-tpu: --output x.mp4 could not be written: No space left on device; nothing of it was kept; "
        "free some space or choose another place\n"
    )
    assert files() == []


@pytest.mark.parametrize(
    ("field", "text", "shown"),
    [
        ("height", "height=100 is odd", "--height 100 is odd"),
        ("mesh", "mesh 'dp=x': no", "--mesh 'dp=x': no"),
        ("num_inference_steps", "num_inference_steps=0 is", "--steps 0 is"),
        (None, "height=100 is odd", "height=100 is odd"),
        ("heads", "heads=40 is not divisible", "heads=40 is not divisible"),
        ("height", "heightened risk", "heightened risk"),
    ],
)
def test_fields_are_shown_as_flags(field, text, shown):
    assert rename_as_flag(text, field, options.find_flag(field, {})) == shown


def test_time_of_a_stage_inside_another_is_counted_once(monkeypatch):
    times = iter([0.0, 1.0, 3.0, 7.0, 15.0])
    monkeypatch.setattr("comfy_tpu.cli.progress.time.monotonic", lambda: next(times))
    account = StageTimes()
    account.add(Progress("denoising", "", 0, 2))
    account.add(Progress("compiling", "transformer", 0, 1))
    account.add(Progress("compiling", "transformer", 1, 1))
    account.add(Progress("denoising", "", 2, 2))
    assert account.seconds == {"denoising": 2.0 + 8.0, "compiling": 4.0}
    assert [program.seconds for program in account.programs] == [4.0]


def start(*argv, **more):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", **more.pop("env", {})}
    return subprocess.Popen([sys.executable, ROOT / "tests/cli/fake_pipeline.py", *argv], env=environment, **more)


INTERRUPTS = {
    "Ctrl-C while denoising": ("denoise", signal.SIGINT, 130, b"comfy-tpu: interrupted\n", 0),
    "Ctrl-C while writing": ("decode", signal.SIGINT, 130, b"comfy-tpu: interrupted\n", 1),
    "kill while writing": ("decode", signal.SIGTERM, 143, b"", 1),
    "hang-up while writing": ("decode", signal.SIGHUP, 129, b"", 1),
}
SLOW_INTERRUPTS = ("Ctrl-C while writing", "hang-up while writing")


@pytest.mark.default_cases("Ctrl-C while denoising")
@pytest.mark.parametrize(
    ("stage", "number", "status", "err", "partial"),
    [
        pytest.param(*case, id=name, marks=pytest.mark.slow if name in SLOW_INTERRUPTS else ())
        for name, case in INTERRUPTS.items()
    ],
)
def test_interrupt(stage, number, status, err, partial, tmp_path):
    ready, said = os.pipe()
    environment = {"FAKE_PAUSE": stage, "FAKE_READY": str(said)}
    process = start(
        *("generate", PROMPT, "-o", "x.gif"), cwd=tmp_path, env=environment, pass_fds=[said], stderr=subprocess.PIPE
    )
    os.close(said)
    with process:
        try:
            assert os.read(ready, 5) == b"ready"
            assert len(list(tmp_path.iterdir())) == partial  # hidden, beside its place
            assert not (tmp_path / "x.gif").exists()
            process.send_signal(number)
            assert process.stderr.read() == err
            assert process.wait() == status
        finally:
            process.kill()
    os.close(ready)
    assert list(tmp_path.iterdir()) == []


def shown_on_terminal(directory, *flags):
    ours, theirs = pty.openpty()  # as it comes it says that it is 0 columns wide, and must show something all the same
    argv = ("generate", PROMPT, "-o", "x.gif", *flags)
    process = start(*argv, cwd=directory, stderr=theirs, stdout=subprocess.PIPE)
    os.close(theirs)
    shown = b""
    with process:
        while True:
            try:
                shown += os.read(ours, 4096)
            except OSError:  # Linux: the other side is closed
                break
        assert process.stdout.read() == b"x.gif\n"
    os.close(ours)
    assert process.returncode == 0
    return shown.decode()


def test_terminal_shows_every_stage(tmp_path):
    text = shown_on_terminal(tmp_path)
    for words in (
        "loading transformer: 100%",
        "2.00kB/2.00kB",
        "compiling transformer (first run at 64×32×9): 0.0 s\r\n",
        "denoising 64×32×9: 100%",
        "4/4",
        "s/step",
        "decoding 64×32×9: 100%",
        "3/3",
    ):
        assert words in text
    assert "reused" not in text
    assert "compiling vae" in text
    assert "0.0 s\r\n" not in text.split("compiling vae", 1)[1]  # from the cache: the line is wiped again
    assert "Traceback" not in text


@pytest.mark.slow
def test_terminal_names_reused_steps(tmp_path):
    text = shown_on_terminal(tmp_path, "--reuse", "0.12")
    assert "denoising 64×32×9, reused 2: " in text
    assert "denoising 64×32×9, reused 2–3: 100%" in text


def test_signal_handlers_are_put_back(opened, capsys):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    run(capsys, "generate", PROMPT, "-o", "x.gif")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before


@pytest.mark.parametrize("command", ["generate", "encode", "denoise", "decode"])
def test_help_is_light_and_shows_defaults(command):
    code = f"""
import sys
from comfy_tpu.cli.main import main
try:
    main([{command!r}, "--help"])
finally:
    print(sorted({{"jax", "torch", "av", "PIL", "tqdm", "numpy"}} & set(sys.modules)))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")
    # The next stages take theirs from the file that they are given.
    shown = f" ({GenerationSettings().fps})" if command in ("generate", "encode") else ""
    assert f"frames per second{shown}\n" in done.stdout
