"""Published models as `ModelFiles`, with the configuration of the transformer alone."""

import json
import tempfile
from pathlib import Path

from comfy_tpu.families.registry import find_published, load_family
from comfy_tpu.pipeline.model_files import ModelFiles


def published_files(hub_id: str) -> ModelFiles:
    found = find_published(hub_id)
    assert found is not None
    _, card = found
    directory = Path(tempfile.mkdtemp())
    (directory / "transformer").mkdir()
    (directory / "transformer" / "config.json").write_text(json.dumps(dict(card.published[hub_id])))
    return ModelFiles(hub_id, directory, load_family(card.name), {}, hub_id=hub_id)
