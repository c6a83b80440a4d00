"""While it runs: what the node says and shows, Cancel, Free, and what a second run does not do again."""

import io
import re

import numpy as np
import pytest
from PIL import Image

from tests.comfyui.client import ComfyClient, Run
from tests.comfyui.graphs import DECODER, ENCODER, FRAMES_OUT, SAMPLER, three_nodes, whole_pipeline
from tests.comfyui.models import LARGE_MODEL, LOCAL_MODEL

pytestmark = pytest.mark.comfyui

STEP = re.compile(r"step (\d+)/(\d+)( · \d+\.\d\d s/step( · \d+:\d\d left)?)?$")


def steps_told(run: Run, node: str = SAMPLER) -> list[int]:
    found = (STEP.search(text) for text in run.texts(node))
    return [int(match[1]) for match in found if match]


# what it says


def test_the_node_says_loading_then_each_step_with_its_time(client: ComfyClient) -> None:
    client.empty_device()
    run = client.succeed(three_nodes(steps=4, seed=1))
    assert run.texts(ENCODER)[0].startswith("loading text encoder 0.0 of 0.7 MB")
    texts = run.texts(SAMPLER)
    assert texts[0] == "demo always draws 64×64\nloading transformer 0.0 of 14.3 MB"
    assert steps_told(run) == [0, 1, 2, 3, 4]
    assert all(" s/step" in text for text in texts if STEP.search(text) and "step 0/" not in text)
    assert run.texts(DECODER)[-2].endswith("64×64, 17 frames · decoding 5/5")
    for node in (ENCODER, SAMPLER, DECODER):
        assert re.search(r"(^|\n)done in \d+\.\d s$", run.texts(node)[-1])


def test_the_bar_goes_from_nothing_to_all_steps(client: ComfyClient) -> None:
    run = client.succeed(three_nodes(steps=3, seed=2))
    values = [(data["value"], data["max"]) for data in run.of("progress") if data["node"] == SAMPLER]
    assert values[-1] == (3, 3)
    assert values == sorted(values)


def test_a_new_size_is_compiled_and_said_so_and_only_once(client: ComfyClient) -> None:
    compiled_before = client.status()["compiled"]["programs"]
    first = client.succeed(three_nodes(seed=1, frames=29))
    before = client.status()["compiled"]
    texts = [text.splitlines()[-1] for text in first.texts()]
    assert "preparing for 64×64, 29 frames" in texts
    # Not where another run has left the programs in the cache on the disk.
    is_compiled = before["programs"] > compiled_before
    assert ("compiling (first run at 64×64, 29 frames)" in texts) == is_compiled
    again = client.succeed(three_nodes(seed=2, frames=29))
    assert not [text for text in again.texts() if "compiling" in text]
    assert client.status()["compiled"] == before


def test_previews_come_where_they_are_on_and_only_there(client: ComfyClient) -> None:
    off = client.succeed(three_nodes(steps=3, seed=3))
    assert off.of("preview") == []
    on = client.succeed(three_nodes(steps=3, seed=4), preview_method="latent2rgb")
    previews = on.of("preview")
    assert len(previews) >= 3  # one of each step, and between two as many as there is time for
    assert {preview["node"] for preview in previews} == {SAMPLER}
    with Image.open(io.BytesIO(previews[-1]["image"])) as image:
        assert image.format == "JPEG"
        assert image.width == image.height


def test_previews_have_the_colours_of_the_video(client: ComfyClient) -> None:
    """A red circle on black, at whatever frame: the reddest place of the preview is red, and its corner is dark."""
    run = client.succeed(three_nodes(steps=8, seed=6), preview_method="latent2rgb")
    with Image.open(io.BytesIO(run.of("preview")[-1]["image"])) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    red, green, blue = max(pixels.reshape(-1, 3), key=lambda colour: colour[0] - colour[1] - colour[2])
    assert red - max(green, blue) > 40
    assert pixels[-2:, -2:].max() < 110


def test_the_pipeline_node_shows_previews_and_both_stages_on_one_bar(client: ComfyClient) -> None:
    run = client.succeed(whole_pipeline(steps=3, seed=5), preview_method="auto")
    assert len(run.of("preview")) >= 3
    values = [(data["value"], data["max"]) for data in run.of("progress") if data["node"] == "pipeline"]
    assert values[-1] == (3 + 5, 3 + 5)
    assert values == sorted(values)


def test_previews_of_a_video_move_between_two_steps(client: ComfyClient) -> None:
    """More images than steps, and not the same one again."""
    run = client.succeed(three_nodes(steps=40, seed=8), preview_method="latent2rgb")
    images = [preview["image"] for preview in run.of("preview")]
    assert len(images) > 40
    last = images[-4:]
    assert len(set(last)) > 1


# what it does not do again


def test_another_seed_loads_nothing_compiles_nothing_and_reruns_only_what_follows(client: ComfyClient) -> None:
    client.succeed(three_nodes(seed=10))
    before = client.status()
    run = client.succeed(three_nodes(seed=11))
    after = client.status()
    assert run.cached == {ENCODER}
    assert run.executed == [SAMPLER, DECODER, FRAMES_OUT]
    assert after["compiled"] == before["compiled"]
    assert after["resident"] == before["resident"]
    assert not [text for text in run.texts() if "loading" in text or "compiling" in text]


def test_another_frame_rate_reruns_only_the_decoder(client: ComfyClient) -> None:
    prompt = three_nodes(seed=12)
    client.succeed(prompt)
    prompt[DECODER]["inputs"]["fps"] = 24
    run = client.succeed(prompt)
    assert run.cached == {ENCODER, SAMPLER}


def test_the_same_prompt_runs_nothing(client: ComfyClient) -> None:
    client.succeed(three_nodes(seed=13))
    run = client.succeed(three_nodes(seed=13))
    assert run.cached == {ENCODER, SAMPLER, DECODER, FRAMES_OUT}
    assert run.texts() == []


# Cancel and Free


@pytest.mark.smoke
def test_cancel_takes_effect_within_a_step_and_the_next_run_works(client: ComfyClient) -> None:
    client.succeed(three_nodes(seed=20))
    run = client.queue(three_nodes(seed=21, steps=100))
    client.wait(run, lambda run: len(steps_told(run)) > 2, "the second step")
    client.interrupt()
    said = len(steps_told(run))
    client.finish(run)
    assert run.outcome == "execution_interrupted"
    assert run.of("execution_interrupted")[0]["node_id"] == SAMPLER
    # One step was under way, and one may have been told while the request was on its way.
    assert len(steps_told(run)) <= said + 2
    assert client.status()["activity"]["stage"] == "idle"
    client.succeed(three_nodes(seed=22))


def test_cancel_while_decoding(client: ComfyClient) -> None:
    client.succeed(three_nodes(seed=20, frames=121))
    run = client.queue(three_nodes(seed=23, frames=121))
    client.wait(run, lambda run: any("decoding 2/31" in text for text in run.texts(DECODER)), "the second frame")
    client.interrupt()
    client.finish(run)
    assert run.outcome == "execution_interrupted"
    assert run.of("execution_interrupted")[0]["node_id"] == DECODER
    client.succeed(three_nodes(seed=24))


@pytest.mark.smoke
def test_free_empties_the_device_and_the_next_run_loads_again_but_compiles_nothing(client: ComfyClient) -> None:
    client.succeed(three_nodes(seed=30))
    assert [entry["label"] for entry in client.status()["resident"]] != []
    client.empty_device()
    assert [device["weights_bytes"] for device in client.status()["devices"]] == [0]
    # Whatever is left are constants of programs, not weights: the demo's are 40 MB.
    client.eventually(lambda: client.get("/probe")["bytes"] < 1e6, "a device without arrays")
    before = client.status()["compiled"]
    run = client.succeed(three_nodes(seed=31))
    assert [text for text in run.texts(SAMPLER) if "loading transformer" in text]
    assert client.status()["compiled"] == before


def test_unload_alone_empties_the_device_too(client: ComfyClient) -> None:
    client.succeed(three_nodes(seed=32))
    client.empty_device(free_memory=False)


def test_free_while_it_runs_waits_for_the_end_and_then_empties(client: ComfyClient) -> None:
    client.succeed(three_nodes(seed=33))
    run = client.queue(three_nodes(seed=34, steps=20))
    client.wait(run, lambda run: len(steps_told(run)) > 2, "the second step")
    client.free()
    client.finish(run)
    assert run.outcome == "execution_success"
    client.eventually(lambda: not client.status()["resident"], "an empty device")


def test_models_are_switched_without_a_manual_step(client: ComfyClient) -> None:
    client.empty_device()
    for model in ("demo", LOCAL_MODEL, "demo"):
        client.succeed(three_nodes(seed=40, model=model))
    labels = {entry["label"] for entry in client.status()["resident"]}
    assert {"demo transformer", f"{LOCAL_MODEL} transformer"} <= labels


def test_a_model_in_comfyuis_folder_is_offered_and_its_size_counts(client: ComfyClient) -> None:
    choices = client.object_info()["Wan21TPUSampler"]["input"]["required"]["model_id"]
    options = choices[1]["options"] if choices[0] == "COMBO" else choices[0]
    assert {"demo", LOCAL_MODEL, LARGE_MODEL} <= set(options)
    run = client.succeed(three_nodes(seed=41, steps=1, model=LARGE_MODEL, width=272))
    assert [text for text in run.texts(SAMPLER) if text.startswith("272×256, 17 frames")]


# TPU Info


def test_info_tells_the_devices_and_what_is_on_them_and_is_never_cached(client: ComfyClient) -> None:
    prompt = {
        **three_nodes(seed=50),
        "info": {"class_type": "TPUInfo", "inputs": {"after": [DECODER, 0]}},
    }
    for _ in range(2):
        run = client.succeed(prompt)
        (text,) = run.outputs("info")["text"]
        assert "1 cpu device" in text
        assert "resident: demo transformer, 28.0 MB" in text
        assert "info" not in run.cached
    alone = client.succeed({"info": {"class_type": "TPUInfo", "inputs": {}}})
    assert "demo VAE" in alone.outputs("info")["text"][0]
