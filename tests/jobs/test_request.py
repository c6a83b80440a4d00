"""A request: what decides its result, its groups and its name; lines with any flag of `generate`."""

import argparse
import dataclasses
from typing import Any

import pytest

from comfy_tpu.cli import batch
from comfy_tpu.cli.batch import parse_values
from comfy_tpu.config import FAST
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.jobs.opening import make_runtime
from comfy_tpu.jobs.request import Request, default_output


def identity(model: str = "m", **values: Any) -> str:
    return Request({"prompt": "a cat", **values}).identity(model, lambda file: f"content of {file}")


def test_what_decides_the_result() -> None:
    base = identity()
    others = [
        identity(prompt="a dog"),
        identity(seed=7),
        identity("another model"),
        identity(dtype="float32"),
        identity(lora=["a.safetensors"]),
        identity(lora=["b.safetensors"]),
        identity(image=["a.png"]),
        identity(attention="int8"),
    ]
    assert len({base, *others}) == len(others) + 1
    assert identity(mesh="tp=8") == identity(platform="cpu") == identity(output="x.mp4") == base
    assert identity(attention="cudnn") == base


def test_the_content_of_a_file_decides() -> None:
    request = Request({"prompt": "a cat", "image": ["a.png"]})
    assert request.identity("m", lambda file: "1") != request.identity("m", lambda file: "2")


def test_groups() -> None:
    first = Request({"prompt": "a cat", "seed": 1, "height": 480})
    assert first.shape_key == Request({"prompt": "a dog", "seed": 2, "height": 480}).shape_key
    assert first.shape_key != Request({"prompt": "a cat", "seed": 1, "height": 720}).shape_key
    assert first.model_key == Request({"prompt": "a cat", "height": 720}).model_key
    assert first.model_key != Request({"prompt": "a cat", "model": "other"}).model_key


def test_it_survives_json() -> None:
    request = Request({"prompt": "ein Kätzchen 猫", "seed": 7, "lora": ["a.safetensors:0.5"]})
    assert Request.from_json(request.to_json()) == request


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ("A cat, surfing!", "a-cat-surfing-0123456789.mp4"),
        ("一只猫", "一只猫-0123456789.mp4"),
        ("../../etc/passwd", "etc-passwd-0123456789.mp4"),
        ("…", "video-0123456789.mp4"),
        ("word " * 100, "-".join(["word"] * 12) + "-0123456789.mp4"),
    ],
)
def test_names(prompt: str, name: str) -> None:
    made = default_output(Request({"prompt": prompt}), "0123456789abcdef", ".mp4")
    assert made == name
    assert len(made.encode()) < 100


def test_a_line_takes_every_name_of_a_flag() -> None:
    line = {"prompt": "a cat", "steps": "20", "guidance-scale": 3, "num_frames": 81, "image": "a.png", "seed": None}
    request = parse_values(line, common={"seed": 5, "lora": ["x.safetensors"]})
    assert request.values == {
        "prompt": "a cat",
        "num_inference_steps": 20,
        "guidance_scale": 3,
        "num_frames": 81,
        "image": ["a.png"],
        "seed": 5,
        "lora": ["x.safetensors"],
    }


def test_fast_is_kept_as_the_values_it_stands_for() -> None:
    """A later version may have others: then it is another job."""
    own = dataclasses.asdict(FAST)
    for given in (True, "true", "1", 1, own):
        assert parse_values({"prompt": "x", "fast": given}, common={}).values == {"prompt": "x", "fast": own}
    for given in (False, "false", "0", 0, " "):
        assert parse_values({"prompt": "x", "fast": given}, common={"fast": own}).values == {"prompt": "x"}
    assert parse_values({"prompt": "x", "fast": None}, common={"fast": own}).values["fast"] == own
    assert parse_values({"prompt": "x", "quantize": "none"}, common={}).values == {"prompt": "x"}
    assert parse_values({"prompt": "x", "quantize": "none", "fast": 1}, common={}).values["quantize"] == "none"
    assert len({identity(), identity(fast=own), identity(fast=own | {"guidance_until": 0.5})}) == 3
    assert Request({"prompt": "x", "fast": own}).model_key != Request({"prompt": "x"}).model_key
    assert make_runtime({"fast": own}).fast == make_runtime({"fast": FAST}).fast == FAST
    assert make_runtime({}).fast is None


def test_fast_of_the_command_line_holds_for_all_lines() -> None:
    parser = argparse.ArgumentParser()
    batch.add_arguments(parser)
    for flags, common in (([], {}), (["--fast"], {"fast": dataclasses.asdict(FAST)})):
        arguments = parser.parse_args(["jobs.txt", "-o", "videos", *flags])
        arguments.parser = parser
        assert batch._common_values(arguments) == common


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"promt": "a cat"}, "promt is no flag of"),
        ({"prompt": "x", "json": True}, "json is of the whole batch"),
        ({"prompt": "x", "checkpoint-every": 2}, "is of the whole batch, as the flag --checkpoint-every"),
        ({"prompt": "x", "seed": [1, 2]}, "seed is a list"),
        ({"prompt": "x", "seed": True}, "seed is a bool"),
        ({"prompt": "x", "fast": "very"}, "fast='very' is neither true nor false"),
        ({"prompt": "x", "fast": {"reuse": 1}}, "is neither true nor false"),
        ({"prompt": {"a": 1}}, "prompt is a dict"),
        ({"seed": 1}, "prompt is missing"),
        ({"prompt": "  "}, "prompt is missing"),
        ({"prompt": "\ud800"}, "not UTF-8"),
    ],
)
def test_lines_that_are_refused(line: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        parse_values(line, common={})


def test_tiny_is_no_file_of_the_model() -> None:
    request = parse_values({"prompt": "a", "vae": "tiny", "tiny_vae": "t.safetensors"}, {})
    assert request.values == {"prompt": "a", "vae_backend": "tiny", "tiny_vae": "t.safetensors"}
    other = parse_values({"prompt": "a", "vae": "tiny", "tiny_vae": "u.safetensors"}, {})
    assert request.model_key != other.model_key
    assert request.identity("m", lambda name: name) != other.identity("m", lambda name: name)
    plain = parse_values({"prompt": "a"}, {}).identity("m", lambda name: "x")
    assert request.identity("m", lambda name: "x") != plain
    previews = parse_values({"prompt": "a", "tiny_vae": "t.safetensors"}, {})
    assert previews.identity("m", lambda name: "x") == plain, "it shows the same"
