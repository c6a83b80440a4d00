"""A pipeline that runs in milliseconds and follows the real one's interface: a square moves over a background.

As a script it is the comfy-tpu command with this pipeline in it. FAKE_PAUSE=stage makes it wait inside that stage, and
say so on the file descriptor FAKE_READY.
"""

import dataclasses
import hashlib
import json
import os
import sys
import threading
import types
from pathlib import Path

import torch

from comfy_tpu.config import GenerationSettings, RuntimeConfig
from comfy_tpu.errors import CheckpointError
from comfy_tpu.families.card import Limits, Preset
from comfy_tpu.families.presets import make_choice
from comfy_tpu.families.settings import check_prompt, make_settings
from comfy_tpu.pipeline.embeddings import PromptEmbeddings
from comfy_tpu.pipeline.progress import Progress, ignore_progress

MODELS = {"demo": "ab12", "other": "cd34"}
PRESETS = {"4step": Preset({"num_inference_steps": 4, "guidance_scale": 1.0, "scheduler": "euler", "flow_shift": 7.0})}
WORDS = 8
"""That its text encoder reads."""


class FakePipeline:
    limits = Limits(16, 16, 256, 4, 121, ("unipc", "euler"))
    tiny_vae = ""
    family = types.SimpleNamespace(
        name="Fake",
        card=types.SimpleNamespace(
            guidance="classifier_free",
            is_guided=lambda scale: scale > 1,
            image=None,
            starts_from_image=False,
            starts_from_video=False,
            sizes={"480P": {"height": 32, "width": 48, "flow_shift": 3.0}},
            limits=limits,
        ),
    )

    def __init__(self, model, on_progress):
        self.model_name = model
        self.model_fingerprint = MODELS[model]
        self.dtype_name = "float32"
        self.defaults = GenerationSettings(height=32, width=64, num_frames=9, num_inference_steps=4)
        self.directory = Path(model)
        self.ran = []
        self._say = on_progress

    @classmethod
    def open(
        cls,
        model="demo",
        runtime=RuntimeConfig(),
        *,
        name=None,
        on_progress=ignore_progress,
        loras=(),
        preset=None,
        check=lambda files: None,
        blank=False,
    ):
        name = name or str(model)
        if name not in MODELS:
            raise CheckpointError(f"model={model} is not a directory; give one", field="model")
        pipeline = cls(name, on_progress)
        files = types.SimpleNamespace(name=name, defaults=pipeline.defaults, family=pipeline.family, presets=PRESETS)
        check(files)
        pipeline.preset = make_choice(PRESETS, (), preset, name)
        pipeline.opened_with = dataclasses.asdict(runtime)
        pipeline.quantization = runtime.quantize or ""
        if runtime.fast is not None:
            pipeline.defaults = dataclasses.replace(pipeline.defaults, **dataclasses.asdict(runtime.fast))
        pipeline.attention_window = str(runtime.attention.window or "")
        notes = [{"name": lora.path.name, "fingerprint": "ef56", "strength": lora.strength} for lora in loras]
        pipeline.loras = types.SimpleNamespace(text=json.dumps(notes) if notes else "", opened=())
        return pipeline

    def settings(self, **chosen):
        return make_settings(self.defaults, chosen, self.limits)

    def settle_context(self, settings, images):
        return settings

    def warn_of_preset(self, settings):
        self.warned_of = settings

    def encode(self, prompt, settings, images=()):
        check_prompt(prompt)
        self._begin("encode", "text_encoder", "512 tokens")
        words = prompt.split()
        seeds = [int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) for text in (prompt, settings.negative_prompt)]
        positive, negative = (torch.randn(1, 8, 4, generator=torch.Generator().manual_seed(seed)) for seed in seeds)
        guided = settings.guidance_scale > 1
        positive = positive.bfloat16()
        cut = " ".join(words[WORDS:])
        return PromptEmbeddings(prompt, {"text": positive}, {"text": negative} if guided else None, cut)

    def denoise(self, embeddings, settings, checkpoint=None):
        size = f"{settings.width}×{settings.height}×{settings.num_frames}"
        self._begin("denoise", "transformer", size)
        shape = (settings.num_videos, 4, (settings.num_frames - 1) // 4 + 1, settings.height // 8, settings.width // 8)
        latents = torch.randn(shape, generator=torch.Generator().manual_seed(settings.seed))
        for step in range(settings.num_inference_steps):
            reused = settings.reuse > 0 and step > 1  # all but the first: nothing is computed here anyway
            self._say(Progress("denoising", "", step, settings.num_inference_steps, size=size, reused=reused))
            pause("denoise")
            latents = latents + settings.guidance_scale * embeddings.positive["text"].float().mean()
        self._say(Progress("denoising", "", settings.num_inference_steps, settings.num_inference_steps, size=size))
        return latents

    def velocities(self, embeddings, settings):
        self.ran.append("velocities")
        return (torch.full((2,), 0.5**step) for step in range(settings.num_inference_steps))

    def plan(self, settings):
        count = settings.num_inference_steps
        return [types.SimpleNamespace(sigma=1 - step / count) for step in range(count)]

    def decode_sound(self, latents, settings):
        return None

    def decode(self, latents, settings):
        size = f"{settings.width}×{settings.height}×{settings.num_frames}"
        self._begin("decode", "vae", size)
        colours = latents.mean((2, 3, 4))[:, :3].sigmoid()
        for index in range(latents.shape[2]):
            frames = torch.full((len(latents), 4 if index else 1, settings.height, settings.width, 3), 0.25)
            frames[:, :, 8:24, 4 * index : 4 * index + 16] = colours[:, None, None, None]
            self._say(Progress("decoding", "", index + 1, latents.shape[2], size=size))
            yield frames
            pause("decode")

    def _begin(self, stage, component, size):
        self.ran.append(stage)
        self._say(Progress("loading", component, 0, 2048))
        self._say(Progress("loading", component, 2048, 2048))
        self._say(Progress("compiling", component, 0, 1, size=size))
        self._say(Progress("compiling", component, 1, 1, size=size, from_cache=component == "vae"))


def pause(stage):
    if os.environ.get("FAKE_PAUSE") == stage:
        os.write(int(os.environ["FAKE_READY"]), b"ready")
        threading.Event().wait()


if __name__ == "__main__":
    from comfy_tpu.cli.main import main

    fake = types.ModuleType("comfy_tpu.pipeline.video")  # the real module would load jax
    fake.VideoPipeline = FakePipeline
    sys.modules[fake.__name__] = fake
    sys.exit(main())
