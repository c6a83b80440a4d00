"""What a model directory of Wan 2.1 has beside its weights, for benchmarks that make one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from comfy_tpu.pipeline.model_files import DEMO_DIRECTORY


def write_small_files(directory: Path) -> None:
    """The scheduler, the demo's tokenizer, and the index."""
    from diffusers import UniPCMultistepScheduler

    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    scheduler.save_pretrained(directory / "scheduler")
    shutil.copytree(DEMO_DIRECTORY / "tokenizer", directory / "tokenizer")
    parts = {
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    }
    (directory / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline", **parts}))
