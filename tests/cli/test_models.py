"""comfy-tpu models, download and lora: what is listed without torch and jax, and the words of a terminal."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from comfy_tpu.cli import download as download_command
from comfy_tpu.cli import main as cli
from comfy_tpu.families.card import NOT_STATED
from comfy_tpu.families.registry import model_cards
from comfy_tpu.hub import inventory
from comfy_tpu.hub.download import Transfer
from comfy_tpu.hub.inventory import DEMO_DIRECTORY, list_models
from tests.hub.fake_hub import FakeHub, serve, sha256
from tests.hub.test_download import MODEL, NEEDED, OTHERS, SHARDS
from tests.waiting import wait_for

HUB_ID = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"


@pytest.fixture
def home(monkeypatch, tmp_path):
    """An empty machine: the hub's cache, and the directory where one works."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    return tmp_path


def run(capsys, *argv):
    capsys.readouterr()
    return cli.main(list(argv)), *capsys.readouterr()


def documents(capsys, *argv):
    status, out, err = run(capsys, "models", *argv, "--json")
    assert (status, err) == (0, "")
    return {model["name"]: model for model in json.loads(out)["models"]}


def put_in_cache(home: Path, hub_id: str, *, without: tuple[str, ...] = ()) -> Path:
    root = home / "hub" / f"models--{hub_id.replace('/', '--')}"
    snapshot = root / "snapshots" / "abc"
    shutil.copytree(DEMO_DIRECTORY, snapshot, ignore=shutil.ignore_patterns("image_to_video", "lora", *without))
    (snapshot / "presets.json").unlink()
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("abc")
    (root / "blobs").mkdir()
    (root / "blobs" / "x").write_bytes(bytes(5000))
    return snapshot


def test_every_published_model_is_listed_with_its_facts(home, capsys):
    found = documents(capsys)
    assert set(found) == {"demo", "demo-image", *(hub_id for card in model_cards() for hub_id in card.published)}
    wan = found[HUB_ID]
    assert (wan["kind"], wan["licence"], wan["local"]) == ("Wan 2.1", "Apache 2.0", None)
    assert 28e9 < wan["download_bytes"] < 30e9
    assert wan["tasks"] == ["text-to-video", "video-to-video"]
    assert wan["presets"]["4step"]["num_inference_steps"] == 4
    assert found["Wan-AI/Wan2.2-TI2V-5B-Diffusers"]["tasks"] == ["text-to-video", "image-to-video"]
    assert all(model["licence"] and model["download_bytes"] is not None for model in found.values())
    silent = {name for name, model in found.items() if model["licence"] == NOT_STATED}
    assert silent == {"linoyts/Wan2.2-VACE-Fun-14B-diffusers"}, "whose card.py says why"
    for name in ("Wan-AI/Wan2.1-VACE-1.3B-diffusers", "Wan-AI/Wan2.2-Animate-14B-Diffusers"):
        assert found[name]["licence"] == "Apache 2.0"
    assert found[HUB_ID]["videos"] == "to start from, optional"
    vace, animate = found["Wan-AI/Wan2.1-VACE-1.3B-diffusers"], found["Wan-AI/Wan2.2-Animate-14B-Diffusers"]
    assert vace["images"] == "first and last frame, both optional; up to 4 references"
    assert vace["videos"] == "control video and mask, optional"
    assert vace["tasks"] == ["text-to-video", "image-to-video", "video-to-video"]
    assert animate["images"] == "one reference"
    assert animate["videos"] == "pose video and face video; background video and mask, optional"
    assert animate["tasks"] == ["image-to-video", "video-to-video"]
    assert found["Qwen/Qwen-Image-Edit-2511"]["images"] == "1 to 4 references"
    assert found["black-forest-labs/FLUX.1-dev"]["images"] == "to start from, optional"
    assert found["black-forest-labs/FLUX.2-dev"]["images"] == "up to 4 references"
    assert found["Qwen/Qwen-Image-Edit-2511"]["videos"] == ""
    assert found["demo"]["local"]["is_complete"]
    assert found["demo"]["presets"]["4step"]["flow_shift"] == 3.0
    assert found["demo-image"]["presets"] == {}


def test_filters(home, capsys):
    assert set(documents(capsys, "flux", "klein", "base")) == {
        "black-forest-labs/FLUX.2-klein-base-4B",
        "black-forest-labs/FLUX.2-klein-base-9B",
    }
    assert all(
        "image" in task for model in documents(capsys, "--task", "text-to-image").values() for task in model["tasks"]
    )
    assert set(documents(capsys, "--downloaded")) == {"demo", "demo-image"}
    changed = documents(capsys, "--task", "video-to-video")
    assert {name for name, model in changed.items() if model["videos"]} == set(changed)
    assert {model["kind"] for model in changed.values()} == {card.name for card in model_cards() if card.videos}
    assert run(capsys, "models", "flux", "nosuchmodel") == (
        1,
        "",
        "comfy-tpu: no model has 'flux' and 'nosuchmodel' in its name; `comfy-tpu models` lists all\n",
    )
    assert run(capsys, "models", "--task", "text-to-speech") == (
        1,
        "",
        "comfy-tpu: --task text-to-speech is unknown; choose from text-to-video, image-to-video, video-to-video, "
        "text-to-image, image-to-image\n",
    )
    assert (
        run(capsys, "models", "--directory", "gone")[2] == "comfy-tpu: --directory gone is not a directory; give one\n"
    )


def test_what_is_here_is_found_in_the_cache_and_in_folders(home, capsys):
    put_in_cache(home, HUB_ID)
    put_in_cache(home, "someone/finetune", without=("vae",))
    shutil.copytree(DEMO_DIRECTORY, home / "ComfyUI" / "models" / "diffusers" / "owner" / "mine")
    shutil.copytree(DEMO_DIRECTORY, home / "disk" / "other")
    (home / "disk" / "no-model").mkdir()
    found = documents(capsys, "--directory", str(home / "disk"))
    assert found[HUB_ID]["local"] == {
        "directory": str(home / "hub" / "models--Wan-AI--Wan2.1-T2V-1.3B-Diffusers" / "snapshots" / "abc"),
        "nbytes": 5000,
        "is_complete": True,
    }
    assert found[HUB_ID]["fits_on_disk"] is True
    assert found["someone/finetune"]["local"]["is_complete"] is False
    assert found["someone/finetune"]["fits_on_disk"] is None
    mine, other = home / "ComfyUI" / "models" / "diffusers" / "owner" / "mine", home / "disk" / "other"
    assert found[str(mine)]["local"]["is_complete"]
    assert found[str(other)]["kind"] == "Wan 2.1"
    assert set(documents(capsys, "--downloaded", "--directory", str(home / "disk"))) >= {"demo", HUB_ID, str(other)}


def test_missing_shards_are_noticed(home):
    snapshot = put_in_cache(home, HUB_ID)
    index = {"weight_map": {"a": "x-00001-of-00002.safetensors", "b": "x-00002-of-00002.safetensors"}}
    (snapshot / "vae" / "x.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "vae" / "x-00001-of-00002.safetensors").write_bytes(b"")
    (snapshot / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    (model,) = (each for each in list_models(home / "hub") if each.name == HUB_ID)
    assert model.local is not None
    assert not model.local.is_complete
    (snapshot / "vae" / "x-00002-of-00002.safetensors").write_bytes(b"")
    (model,) = (each for each in list_models(home / "hub") if each.name == HUB_ID)
    assert model.local.is_complete


def test_the_table_fits_a_reader(home, capsys):
    status, out, _ = run(capsys, "models", "wan2.2", "--presets")
    assert status == 0
    header, first, *_ = out.splitlines()
    assert header.split() == ["model", "kind", "download", "here", "licence", "images", "videos", "presets"]
    assert first.split()[0] == "Wan-AI/Wan2.2-T2V-A14B-Diffusers"
    assert "4step, 8step" in first
    assert f"Downloads go to {home / 'hub'}; its disk" in out
    assert "HF_HOME chooses another" in out
    assert (
        "Wan 2.2, 4step: 4 steps, guidance_scale 1, scheduler euler-trailing, flow_shift 5, guidance_scale_2 1 (li"
        in out
    )


def test_presets_are_shown_once_for_every_kind_and_for_every_model_with_its_own(home, capsys):
    lines = run(capsys, "models", "--presets")[1].rpartition("\n\n")[2].splitlines()
    shown = [line.partition(":")[0] for line in lines]
    of_kinds = {f"{card.name}, {name}" for card in model_cards() if card.published for name in card.presets}
    assert set(shown) == of_kinds | {"demo, 4step"}
    assert {"Wan 2.1, causvid", "Wan 2.1 image-to-video, causvid"} <= set(shown)
    assert len(shown) == len(set(shown))


def test_a_full_disk_is_marked_by_the_rule_of_download(home, capsys, monkeypatch):
    size = documents(capsys, "T2V-1.3B")[HUB_ID]["download_bytes"]
    for free, fits in ((10**9, False), (size + 10**9 - 1, False), (size + 10**9, True)):
        usage = shutil._ntuple_diskusage(10**12, 0, free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        assert ("29 GB !" in run(capsys, "models", "T2V-1.3B")[1]) is not fits
        assert documents(capsys, "T2V-1.3B")[HUB_ID]["fits_on_disk"] is fits


def test_what_fits_is_said_by_the_formulas_of_the_plan(home, capsys):
    status, out, _ = run(capsys, "models", "T2V-1.3B", "--fits", "v6e-8", "--json")
    assert status == 0
    document = json.loads(out)
    assert document["machine"] == {"name": "v6e-8", "usable_bytes": int(0.9 * 32_000_000_000)}
    (model,) = document["models"]
    assert model["fits"]["fits"]
    # The largest part besides the transformer: the text encoder, whose 5.7 billion parameters eight chips share.
    assert model["fits"]["needed_bytes"] >= 5_680_910_336 * 2 // 8


def test_listing_imports_neither_torch_nor_jax(home):
    code = (
        "import sys; from comfy_tpu.cli.main import main; status = main(['models', 'wan']); "
        "print(sorted({'torch', 'jax', 'diffusers', 'transformers'} & set(sys.modules)), status)"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.splitlines()[-1] == "[] 0"


def test_a_damaged_directory_is_no_model(home):
    folder = home / "disk" / "odd"
    folder.mkdir(parents=True)
    for content in ("[]", "{", '{"_class_name": "WanPipeline"}', '{"_class_name": 3}'):
        (folder / "model_index.json").write_text(content)
        names = {model.name: model.local for model in inventory.list_models(home / "hub", [home / "disk"])}
        assert names.get(str(folder)) is None or not names[str(folder)].is_complete


BAD_DOWNLOADS = {
    "demo": "comfy-tpu: MODEL demo comes with comfy-tpu; there is nothing to download\n",
    "wan": 'comfy-tpu: MODEL wan is no hub id; give one such as "owner/name", or see `comfy-tpu models`\n',
}


@pytest.mark.parametrize(("model", "line"), BAD_DOWNLOADS.items())
def test_a_download_of_nothing_is_refused(home, capsys, model, line):
    assert run(capsys, "download", model) == (1, "", line)


def test_a_local_dir_is_a_directory(home, capsys):
    Path("file").write_text("")
    assert run(capsys, "download", HUB_ID, "--local-dir", "file")[2].endswith("file is a file; give a directory\n")
    assert run(capsys, "download", HUB_ID, "--local-dir", "")[2].endswith("is empty; give a path\n")


def test_json_lines_come_at_the_beginning_the_end_and_now_and_then(capsys, monkeypatch):
    clock = iter([0.0, 0.5, 1.6, 1.7, 1.8])
    monkeypatch.setattr(download_command.time, "monotonic", lambda: next(clock))
    display = download_command.JsonLines()
    for done in (0, 10, 20, 30, 40):
        display(Transfer("a", done, 40))
    display.finish(Path("m"))
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event.get("done") for event in events] == [0, 20, 40, None]
    assert events[-1] == {"event": "done", "directory": "m", "bytes": 40}


@pytest.mark.thorough  # by default: tests/hub/test_download.py
def test_an_interrupted_download_goes_on_in_the_next_process(home):
    """Ctrl-C while the first shard comes: the second process asks for the rest of it."""
    hub = FakeHub({**NEEDED, **OTHERS})
    hub.stalls_after[SHARDS[0]] = 90_000
    with serve(hub):
        environ = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_XET": "1"}
        stopping = home / "stopping"
        code = (
            "import sys; from concurrent.futures import ThreadPoolExecutor as Pool; from pathlib import Path; "
            "from huggingface_hub import constants; constants.DOWNLOAD_CHUNK_SIZE = 10_000; own = Pool.shutdown; "
            f"Pool.shutdown = lambda *args, **how: (Path({str(stopping)!r}).touch(), own(*args, **how)); "
            "from comfy_tpu.cli.main import main; sys.exit(main(sys.argv[1:]))"
        )
        command = [sys.executable, "-c", code, "download", MODEL, "--local-dir", str(home / "own"), "--json"]
        first = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert hub.on_stall.wait(60)
        hub.stalls_after.clear()
        partials = (home / "own" / ".cache" / "comfy-tpu").glob
        name = f"{sha256(NEEDED[SHARDS[0]])}*"  # the other shard comes at the same time
        wait_for(lambda: any(path.stat().st_size >= 10_000 for path in partials(name)), 60)
        first.send_signal(signal.SIGINT)
        wait_for(stopping.exists, 60)  # or the rest could come before the signal is noticed
        hub.on_resume.set()
        _, error = first.communicate(timeout=60)
        assert (first.returncode, error.splitlines()[-1]) == (130, "comfy-tpu: interrupted")
        hub.requests.clear()
        second = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=60)
    (range_,) = hub.bodies(SHARDS[0])
    assert range_.startswith("bytes=")
    assert int(range_[6:-1]) >= 10_000
    events = [json.loads(line) for line in second.stdout.splitlines()]
    total = sum(map(len, NEEDED.values()))
    assert events[-1] == {"event": "done", "directory": str(home / "own"), "bytes": total}
    assert (home / "own" / SHARDS[0]).read_bytes() == NEEDED[SHARDS[0]]


def test_a_lora_is_reported_on(home, capsys):
    name = "diffusion_model.blocks.0.self_attn.q"
    tensors = {f"{name}.lora_down.weight": torch.zeros(4, 256), f"{name}.lora_up.weight": torch.zeros(256, 4)}
    save_file(tensors, "few.safetensors", {"comfy_tpu.preset": "4step"})
    status, out, err = run(capsys, "lora", "few.safetensors")
    assert (status, err) == (0, "")
    rows = dict(line.split(None, 1) for line in out.splitlines())
    assert rows["fits"] == "1 of 1 modules"
    assert rows["preset"].startswith("4step: 4 steps, guidance_scale 1")
    assert "rank 4; alpha over rank 1" in rows["keys"]
    document = json.loads(run(capsys, "lora", "few.safetensors", "--json")[1])
    assert (document["schema"], document["preset"], document["problem"]) == (1, "4step", None)
    status, out, err = run(capsys, "lora", "few.safetensors", "--model", HUB_ID)
    assert status == 1
    assert err.endswith("use a LoRA made for this size of Wan 2.1\n")
    assert run(capsys, "lora", "gone.safetensors")[2] == (
        "comfy-tpu: FILE gone.safetensors is not a file; give a .safetensors file\n"
    )


def test_a_key_of_the_model_may_be_left_out(home, capsys):
    shutil.copytree(DEMO_DIRECTORY, "newer")
    path = Path("newer/transformer/config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "shiny": True}))
    name = "diffusion_model.blocks.0.self_attn.q"
    tensors = {f"{name}.lora_down.weight": torch.zeros(4, 256), f"{name}.lora_up.weight": torch.zeros(256, 4)}
    save_file(tensors, "few.safetensors")
    status, _, err = run(capsys, "lora", "few.safetensors", "--model", "newer")
    assert (status, "--ignore-config-key shiny" in err) == (1, True)
    assert run(capsys, "lora", "few.safetensors", "--model", "newer", "--ignore-config-key", "shiny")[0] == 0
