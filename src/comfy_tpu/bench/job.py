"""What is to be measured: a whole run as a user asks for it, or one part of it as a message to its process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from comfy_tpu.config import VAE_BACKEND, VaeBackend
from comfy_tpu.errors import InvalidValueError

Peer = Literal["ours", "fp8", "fast", "eager", "compile"]
"""fp8: ours, with 8-bit products in the transformer. fast: ours, with the preset `fast`. eager, compile: diffusers,
without and with torch.compile."""
PEERS: tuple[Peer, ...] = ("ours", "fp8", "fast", "eager", "compile")
LOSSY_PEERS: tuple[Peer, ...] = ("fp8", "fast")
SMALL_PEERS: tuple[Peer, ...] = ("ours", "eager")
"""The default on a CPU and for small models: torch.compile would take longer than the rest, and fp8 is emulated."""
_LOSSLESS: tuple[Peer, ...] = ("ours", "eager", "compile")
_OF_A_FORWARD: tuple[Peer, ...] = ("ours", "fp8", "eager", "compile")

PART_PEERS: Mapping[str, tuple[Peer, ...]] = {
    "transformer": _OF_A_FORWARD,
    "accuracy": _OF_A_FORWARD,
    "vae": _LOSSLESS,
    "text": _LOSSLESS,
    "compile": ("ours",),
    "end-to-end": ("ours", "fast", "eager", "compile"),
    "scaling": ("ours", "fp8", "eager"),  # torch.compile: every size would cost minutes, and its slope is the same
}
"""The peers of every part."""
PARTS = tuple(PART_PEERS)
SIZED_PARTS = ("transformer", "accuracy", "vae", "compile", "end-to-end")
"""Parts that are measured once for every size."""

MACHINE = "machine"
"""The first process of a run: looks at the machine, and checks what is asked for."""
DEVICES = "scaling over devices"
"""The second process of the part "scaling": the small model of the family, ours, on virtual devices of the host."""
VIRTUAL_DEVICES = (1, 2, 4, 8)

SMALL_MODEL = "small"
"""The model id of a small random model; `small:FAMILY` for a family other than the first."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A run as a user asks for it, where "auto" and empty are "by the machine and the model"; or one part of it at one
    size, with all of that decided."""

    part: str = MACHINE
    model: str = "auto"
    mesh: str = "single"
    dtype: str = "auto"
    parts: tuple[str, ...] = PARTS
    sizes: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    repeats: int = 5
    steps: int = 10
    """Of the end-to-end part."""
    vae_backend: VaeBackend = VAE_BACKEND
    """Of ours."""
    regional: bool = False
    """torch.compile of each block instead of the whole forward."""
    size: str = ""
    """Of one part."""
    cache_directory: str = ""
    """A fresh one for the part: programs in it are compiled from nothing."""
    state: Literal["cold", "warm"] = "cold"
    """Whether the cache directory holds the programs of an earlier process."""
    inputs: str = ""
    """A directory with weights and inputs that an earlier process made, for parts that need one."""
    started: float = 0.0
    """time.time() when the process was started."""

    def __post_init__(self) -> None:
        for name in ("repeats", "steps"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidValueError(f"{name}={value!r} is not allowed; give a whole number from 1", field=name)
        possible = [peer for peer in PEERS if any(peer in PART_PEERS[part] for part in self.parts)]
        if self.part == MACHINE and self.peers and not set(self.peers) & set(possible):
            raise InvalidValueError(
                f"peers={','.join(self.peers)}: nothing would be measured in {', '.join(self.parts)}; "
                f"choose from {', '.join(possible)}",
                field="peers",
            )

    @property
    def command(self) -> str:
        """The command that repeats the run, without the files of its results."""
        words = ["comfy-tpu", "bench", "--what", ",".join(self.parts)]
        words += ["--size", *self.sizes] if self.sizes else []
        words += ["--peers", ",".join(self.peers)] if self.peers else []
        for field in ("model", "mesh", "dtype", "repeats", "vae_backend"):
            value = getattr(self, field)
            words += [f"--{field.replace('_', '-')}", str(value)] if value != getattr(Job, field) else []
        words += ["--steps", str(self.steps)] if "end-to-end" in self.parts else []
        words += ["--compile-regional"] if self.regional else []
        return " ".join(words)

    def name_with_backend(self, name: str) -> str:
        """The name of a row that our VAE is part of: results of two backends are never taken for each other."""
        return name if self.vae_backend == VAE_BACKEND else f"{name}, VAE by {self.vae_backend}"

    @property
    def candidates(self) -> tuple[str, ...]:
        """Those of the chosen peers that this part has."""
        known = ("ours",) if self.part == DEVICES else PART_PEERS[self.part]
        return tuple(peer for peer in self.peers if peer in known)
