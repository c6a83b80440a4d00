"""The counted work of published models: each is traced once in a process, whatever the settings."""

import dataclasses
from typing import Any

from comfy_tpu.parallel.workload import Workload
from comfy_tpu.planning.models import find_model


def published_work(name: str, **settings: Any) -> Workload:
    """Of a model by its id on the hub, or the last part of it."""
    model = find_model(name)
    return model.workload(dataclasses.replace(model.defaults, **settings))
