"""The share of the time that a GPU is idle while `comfy-tpu batch` makes videos with a model of Wan 2.1 14B's shapes.

    python -m benchmarks.batch.device_idle --directory /scratch --jobs 4 --steps 8 --json result.json

The weights are random (28 GB on the disk), the text encoder has one layer of the published width. nvidia-smi is asked
ten times a second from the first step of the first job to the last file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.wan_directory import write_small_files
from comfy_tpu.families.wan.card import WAN21


def make_model(directory: Path) -> None:
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        transformer = WanTransformer3DModel(**WAN21.published["Wan-AI/Wan2.1-T2V-14B-Diffusers"])
    transformer.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter.copy_(torch.randn(parameter.shape, device="cuda") * 0.02)
    transformer.save_pretrained(directory / "transformer")
    del transformer
    torch.set_default_dtype(torch.float32)
    AutoencoderKLWan().save_pretrained(directory / "vae")
    config = UMT5Config(d_model=4096, d_ff=1024, num_layers=1, num_heads=64, d_kv=64, vocab_size=1024)
    UMT5EncoderModel(config).save_pretrained(directory / "text_encoder")
    write_small_files(directory)


def measure(model: Path, out: Path, jobs: int, options: list[str]) -> dict[str, Any]:
    out.mkdir()
    lines = [{"prompt": f"a red circle {seed}", "seed": seed, "output": f"{seed}.mp4"} for seed in range(jobs)]
    (out / "jobs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = [sys.executable, "-m", "comfy_tpu.cli", "batch", str(out / "jobs.jsonl"), "-o", str(out), "--json"]
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "100"]
    samples: list[tuple[float, int]] = []
    first_step, finished = 0.0, list[float]()
    with (
        subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as asking,
        subprocess.Popen([*command, "--model", str(model), *options], stdout=subprocess.PIPE, text=True) as batch,
    ):
        import threading

        def listen() -> None:
            for line in asking.stdout or ():
                samples.append((time.monotonic(), int(line)))

        threading.Thread(target=listen, daemon=True).start()
        for line in batch.stdout or ():
            event = json.loads(line)
            if event["event"] == "progress" and event["stage"] == "denoising" and event["done"] and not first_step:
                first_step = time.monotonic()
            if event["event"] == "done":
                finished.append(time.monotonic())
        asking.terminate()
    assert batch.returncode == 0
    # From the first file on: programs are compiled then, and the last job has no other to overlap with.
    steady = [used for at, used in samples if finished[0] <= at <= finished[-2]]
    whole = [used for at, used in samples if first_step <= at <= finished[-1]]
    results = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    return {
        "jobs": jobs,
        "options": options,
        "idle_percent_between_the_first_and_the_last_but_one": 100 - sum(steady) / len(steady),
        "idle_percent_from_the_first_step_to_the_last_file": 100 - sum(whole) / len(whole),
        "seconds_of_a_job": results[-2]["seconds"],
        "seconds_between_files": [later - earlier for earlier, later in itertools.pairwise(finished)],
        "gpu": torch.cuda.get_device_name(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model = arguments.directory / "wan-14b-random"
    if not model.exists():
        make_model(model)
    options = ["--size", "480P", "--steps", str(arguments.steps)]
    text = json.dumps(measure(model, arguments.directory / "videos", arguments.jobs, options), indent=2)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
