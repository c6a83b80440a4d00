"""TPU Load Pipeline and the conditioning of samplers over the stand-in for ComfyUI; prints one JSON object.

python tests/comfy_pack/run_pipeline_node.py MODELS_DIRECTORY
"""

import contextlib
import json
import logging
import sys
from pathlib import Path

import fake_comfyui  # beside this file
import torch

from comfy_tpu.comfy.node_text import join_line
from comfy_tpu.config import RuntimeConfig, SingleFiles
from comfy_tpu.errors import ComfyTpuError
from comfy_tpu.families.wan.card import CARD
from comfy_tpu.pipeline.progress import Progress
from comfy_tpu.pipeline.video import VideoPipeline

TEXT = torch.zeros(1, 512, 128)
SAMPLING = {"height": 720, "width": 1280, "num_frames": 17, "num_inference_steps": 4, "guidance_scale": 5.0, "seed": 1}


def entry(**extra):
    return [TEXT + len(extra), extra]


CONDITIONINGS = {
    "plain": [entry()],
    "halves": [entry(end_percent=0.5), entry(start_percent=0.5, end_percent=1.0)],
    "combined": [entry(), entry()],
    "late": [entry(start_percent=0.5)],
    "area": [entry(area=(8, 8, 0, 0))],
    "mask": [entry(), entry(mask=torch.ones(1, 8, 8))],
    "strength": [entry(strength=0.5)],
    "guidance": [entry(guidance=3.5)],
    "control": [entry(control=object())],
    "no conditioning": "text",
}


def outcome(call):
    try:
        made = call()
    except ComfyTpuError as error:
        return str(error)
    return made


def run(models):
    from comfy_tpu.comfy import family_nodes, run  # which import ComfyUI
    from comfy_tpu.comfy.pipeline_node import TPULoadPipeline

    checked = []
    sys.modules["comfy_tpu.comfy.pipeline_node"].check_single_files = checked.append
    files = {"transformer": "t.safetensors", "text_encoder": "e.safetensors", "vae": "v.sft"}
    load = TPULoadPipeline.execute
    (single,) = load(base_model="auto", **files).result
    node = {
        "files": repr(single)
        == repr(SingleFiles((models / "t.safetensors",), (models / "e.safetensors",), models / "v.sft")),
        "checked": checked == [single],
        "whole": load(base_model="demo", transformer="none", text_encoder="none", vae="none").result[0],
        "nothing": outcome(lambda: load(base_model="auto", transformer="none", text_encoder="none", vae="none")),
        "no vae": outcome(lambda: load(base_model="auto", **(files | {"vae": "none"}))),
        "valid": TPULoadPipeline.validate_inputs(**files),
        "gguf": TPULoadPipeline.validate_inputs(**(files | {"transformer": "t.gguf"})),
        "pickle": TPULoadPipeline.validate_inputs(**(files | {"text_encoder_2": "e.ckpt"})),
        "absent": TPULoadPipeline.validate_inputs(**(files | {"vae": "other.safetensors"})),
    }
    pipeline = VideoPipeline.open("demo", RuntimeConfig(mesh="single"))
    seen, opened = {}, []
    pipeline.denoise = lambda embeddings, settings: seen.update(it=embeddings) or torch.zeros(1, 16, 5, 8, 8)
    pipeline.to_vae_scale = lambda latents: latents
    family_nodes.pipeline_run = lambda family, model, *more: opened.append(model) or contextlib.nullcontext(pipeline)
    (sampler,) = (node for node in family_nodes.make_nodes(CARD.node_sets[0]) if node.KIND == "TPUSampler")
    conditionings = {}
    for name, given in CONDITIONINGS.items():
        before = len(opened)
        plain = {"negative_prompt_embeds": [entry()], "model_id": "demo", **SAMPLING}
        made = outcome(lambda given=given, plain=plain: sampler.execute(prompt_embeds=given, **plain))
        timed = (
            [(each.start, each.end, float(each.embeddings["text"].max())) for each in seen.get("it").timed_positive]
            if seen
            else []
        )
        conditionings[name] = made if isinstance(made, str) else timed
        assert (len(opened) > before) == (not isinstance(made, str)), "refused before the model is opened"
    sampler.execute(prompt_embeds=[entry()], pipeline=single, **plain)
    wrong = outcome(lambda: sampler.execute(prompt_embeds=[entry()], pipeline=3, **plain))

    report = run.NodeReport.__new__(run.NodeReport)
    report.notes, report._stages, report._node, shown = [], {}, "7", []
    report._shown, report._shown_at = [], 0.0
    run.send_node_text = lambda node, lines: shown.append("\n".join(map(join_line, lines)))
    pipeline.on_progress = report
    run.comfy.model_management.throw_exception_if_processing_interrupted = lambda: None
    run.send_status = lambda **options: None
    sampler.execute(prompt_embeds=[entry()], **plain)
    report(Progress("denoising", "", 1, 4, size="64×64×17"))
    return {
        "node": node,
        "conditionings": conditionings,
        "pipeline wins": opened[-2] == single,
        "wrong pipeline": wrong,
        "shown": shown[-1],
    }


if __name__ == "__main__":
    logging.disable()
    models = Path(sys.argv[1])
    fake_comfyui.install(models)
    paths = sys.modules["folder_paths"]
    paths.get_full_path = lambda folder, name: str(models / name) if (models / name).is_file() else None
    sys.stdout.write(json.dumps(run(models)) + "\n")
