"""How a server is started."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a client may ask for at most."""

    body_bytes: int = 32 * 2**20
    json_bytes: int = 2**20
    """Of a body in JSON, which has no images. Parsing holds the interpreter: 32 MB of it would hold every poll up."""
    body_seconds: float = 60.0
    """A body that has not arrived by then is not waited for."""
    stage_bytes: int = 512 * 2**20
    """Of the embeddings or latents of a stage. Those of Wan 2.1 at 1280×720×81 have 16 MB and 19 MB, and with an image
    60 MB."""
    stage_seconds: float = 900.0
    """A stage's body that has not arrived by then is not waited for."""
    prompt_characters: int = 10_000
    images: int = 4
    image_pixels: int = 4096 * 4096
    image_side: int = 16384
    """The longest side of an image."""
    video_body_bytes: int = 256 * 2**20
    """Of a form with videos, where a served model takes some."""
    video_frames: int = 4096
    """Pictures of a given video."""
    video_seconds: float = 120.0
    """The longest that a given video takes."""
    queued_jobs: int = 1000
    """Jobs of all clients that wait; more are refused with 429."""
    client_requests: int = 200
    """Requests of one client with a key that are open at once: those that follow events, or wait for images, stay."""
    job_seconds: float | None = None
    """The longest that a job may take by its estimate; None: any time."""
    sizes: tuple[tuple[int, int], ...] = ()
    """The widths and heights that jobs may have; empty: any."""
    new_shapes: int = 20
    """Shapes that a client with a key may order in an hour and nobody did before: each is compiled."""


@dataclasses.dataclass(frozen=True)
class Retention:
    """Which finished jobs are forgotten, with their files."""

    seconds: float = 7 * 86400.0
    bytes: int = 50 * 10**9


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    models: tuple[str, ...]
    """The names by which clients may choose a model: hub ids, directories, "demo"."""
    directory: Path
    """Of the ledger and the files; servers that share it share the jobs."""
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Clients' keys, by the client's name. None: everybody is welcome, on loopback only."""
    common: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Fields of every request that a client cannot choose, such as mesh and dtype."""
    lora_directory: Path | None = None
    batch_size: int | None = None
    """The most requests that share a step; None: as many as there is room for."""
    logs_prompts: bool = False
    limits: Limits = Limits()
    retention: Retention = Retention()
