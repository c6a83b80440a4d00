"""Writes families/*/published/*.json: the configurations of the published models, from ../shared/published.

Each part of a model has its configuration and a `source`: verbatim (the file of the hub), reconstructed (from code or a
quote of it), or unknown (that file could not be had; `like` names a file of another model that takes its place, and
without `like` the values are ours). Facts of unknown parts without `like` are kept as they are.

    .venv/bin/python tools/published_facts.py            # write
    .venv/bin/python tools/published_facts.py --missing  # print what could not be had
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT.parent / "shared" / "published"
FAMILIES = ROOT / "src" / "comfy_tpu" / "families"


def _file(part: str) -> str:
    special = {"model_index": "model_index.json", "scheduler": "scheduler/scheduler_config.json"}
    return special.get(part, f"{part}/config.json")


def _all_of(directory: str, *parts: str) -> dict[str, str]:
    return {part: f"{directory}/{_file(part)}" for part in parts}


_WAN21 = "Wan-AI__Wan2.1-T2V-1.3B-Diffusers"
_QWEN, _EDIT = "Qwen__Qwen-Image", "Qwen__Qwen-Image-Edit"
_KLEIN_4B, _KLEIN_9B = "black-forest-labs__FLUX.2-klein-4B", "black-forest-labs__FLUX.2-klein-9B"
_LTX, _TURBO = "Lightricks__LTX-Video-0.9.7-diffusers", "Tongyi-MAI__Z-Image-Turbo"
_WAN = {"scheduler": "", **_all_of(_WAN21, "text_encoder", "vae")}
_WAN_IMAGE = {**_WAN, "image_encoder": ""}
_HUNYUAN = dict.fromkeys(("model_index", "text_encoder", "text_encoder_2"), "")
_SIGLIP = {"image_encoder": "black-forest-labs__FLUX.1-Redux-dev/image_encoder/config.json"}
_GEMMA = {"model_index": "", "text_encoder": "google__gemma-3-12b-it/config.json"}


MODELS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "wan": {
        "Wan-AI/Wan2.1-T2V-14B-Diffusers": {**_WAN, **_all_of(_WAN21, "model_index")},
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": {},
        "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": {**_WAN_IMAGE, "model_index": ""},
        "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": {**_WAN_IMAGE, "model_index": ""},
        "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers": {**_WAN_IMAGE, "model_index": ""},
        "Wan-AI/Wan2.1-VACE-14B-diffusers": {**_WAN, "model_index": ""},
        "Wan-AI/Wan2.1-VACE-1.3B-diffusers": {**_WAN, "model_index": ""},
        "Wan-AI/Wan2.2-T2V-A14B-Diffusers": {**_WAN, "model_index": ""},
        "Wan-AI/Wan2.2-I2V-A14B-Diffusers": {**_WAN, "model_index": ""},
        "Wan-AI/Wan2.2-TI2V-5B-Diffusers": {},
        "Wan-AI/Wan2.2-Animate-14B-Diffusers": {**_WAN_IMAGE, "model_index": ""},
        "linoyts/Wan2.2-VACE-Fun-14B-diffusers": {**_WAN, "model_index": ""},
    },
    "flux": {"black-forest-labs/FLUX.1-dev": {}, "black-forest-labs/FLUX.1-schnell": {}},
    "flux2": {
        "black-forest-labs/FLUX.2-dev": {"model_index": "", **_all_of(_KLEIN_4B, "vae", "scheduler")},
        "black-forest-labs/FLUX.2-klein-4B": {},
        "black-forest-labs/FLUX.2-klein-9B": {},
        "black-forest-labs/FLUX.2-klein-base-4B": {
            "model_index": "",
            **_all_of(_KLEIN_4B, "text_encoder", "vae", "scheduler"),
        },
        "black-forest-labs/FLUX.2-klein-base-9B": {
            "model_index": "",
            **_all_of(_KLEIN_9B, "text_encoder", "vae", "scheduler"),
        },
    },
    "hunyuan_video": {
        f"hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-{name}": _HUNYUAN | (_SIGLIP if "i2v" in name else {})
        for name in ("720p_t2v", "480p_t2v", "720p_i2v", "480p_i2v")
    },
    "ltx_video": {"Lightricks/LTX-Video": {"model_index": "", **_all_of(_LTX, "text_encoder")}},
    "ltx2": {"Lightricks/LTX-2": _GEMMA, "diffusers/LTX-2.3-Diffusers": _GEMMA},
    "z_image": {
        "Tongyi-MAI/Z-Image-Turbo": {},
        "Tongyi-MAI/Z-Image": {"scheduler": "", **_all_of(_TURBO, "model_index", "text_encoder", "vae")},
    },
    "qwen_image": {
        "Qwen/Qwen-Image": {},
        "Qwen/Qwen-Image-2512": _all_of(_QWEN, "model_index", "transformer", "text_encoder", "vae", "scheduler"),
        "Qwen/Qwen-Image-Edit": {},
        "Qwen/Qwen-Image-Edit-2511": {"model_index": "", **_all_of(_EDIT, "text_encoder", "vae", "scheduler")},
        "Qwen/Qwen-Image-Edit-2509": {
            "model_index": "",
            **_all_of(_EDIT, "transformer", "text_encoder", "vae", "scheduler"),
        },
    },
}
"""By family and hub id: the file of another model that takes the place of a part that could not be had, or "" where
there is none."""

_PLACES = ("_name_or_path", "_commit_hash")
"""Keys about the place that a file was written from."""


def facts_file(family: str, hub_id: str) -> Path:
    return FAMILIES / family / "published" / f"{hub_id.replace('/', '__')}.json"


def make_facts(hub_id: str, stand_ins: Mapping[str, str], before: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a model. `before`: those that were written earlier."""
    directory = hub_id.replace("/", "__")
    facts = {}
    for name, source in _sources(directory):
        part = "model_index" if name == "model_index.json" else name.partition("/")[0]
        if name == _file(part):
            facts[part] = {"source": source, "config": _read(f"{directory}/{name}")}
    for part, path in stand_ins.items():
        if part not in facts and path:
            facts[part] = {"source": "unknown", "like": path, "config": _read(path)}
        elif part not in facts:
            facts[part] = before.get(part, {"source": "unknown", "config": {}})
    return dict(sorted(facts.items()))


def _sources(directory: str) -> Iterator[tuple[str, str]]:
    """The files of a model's directory with verbatim or reconstructed."""
    with (PUBLISHED / "SOURCES.tsv").open(newline="") as opened:
        for row in csv.reader(opened, delimiter="\t", quoting=csv.QUOTE_NONE):
            owner, _, name = row[0].partition("/")
            if owner == directory:
                yield name, "verbatim" if row[4].startswith("verbatim") else "reconstructed"


def _read(path: str) -> dict[str, Any]:
    content = json.loads((PUBLISHED / path).read_text())
    return {name: value for name, value in content.items() if name not in _PLACES}


def render(facts: Mapping[str, Any]) -> str:
    """JSON with lists of numbers and words on one line."""
    text = json.dumps(facts, indent=2)
    return re.sub(r"\[[^\[\]{}]*\]", lambda match: f"[{' '.join(match[0][1:-1].split())}]", text) + "\n"


def list_missing() -> Iterator[str]:
    for models in MODELS.values():
        for hub_id, stand_ins in models.items():
            known = {name for name, _ in _sources(hub_id.replace("/", "__"))}
            for part, path in stand_ins.items():
                if _file(part) not in known:
                    yield f"{hub_id:58} {part:14} {f'like {path}' if path else 'our own values'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--missing", action="store_true", help="print what could not be had, and write nothing")
    if parser.parse_args().missing:
        sys.stdout.writelines(f"{line}\n" for line in list_missing())
        return
    for family, models in MODELS.items():
        for hub_id, stand_ins in models.items():
            path = facts_file(family, hub_id)
            before = json.loads(path.read_text()) if path.is_file() else {}
            path.parent.mkdir(exist_ok=True)
            path.write_text(render(make_facts(hub_id, stand_ins, before)))


if __name__ == "__main__":
    main()
