"""What is to be measured: sizes, the two models, and one part of a run as a message to its process."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.wan.card import TRANSFORMER_14B

Peer = Literal["ours", "fp8", "eager", "compile"]
"""fp8: ours, with 8-bit products in the transformer."""
PEERS: tuple[Peer, ...] = ("ours", "fp8", "eager", "compile")
ON_A_CPU: tuple[Peer, ...] = ("ours", "eager")
"""Unless others are asked for: torch.compile would take longer than everything else, and fp8 is emulated."""

_UNQUANTIZED: tuple[Peer, ...] = ("ours", "eager", "compile")

PEERS_OF: Mapping[str, tuple[Peer, ...]] = {
    "transformer": PEERS,
    "accuracy": PEERS,
    "vae": _UNQUANTIZED,
    "text": _UNQUANTIZED,
    "compile": ("ours",),
    "end-to-end": _UNQUANTIZED,
    "scaling": ("ours", "fp8", "eager"),  # torch.compile: every size would cost minutes, and its slope is the same
}
"""Who is measured in a part."""
PARTS = tuple(PEERS_OF)

DEVICES = "scaling over devices"
"""The second process of the part "scaling": it has the host cut into virtual devices, and the small model by ours."""

SPATIAL, TEMPORAL, PATCH = 8, 4, 2
"""Pixels and frames of a latent, and latents of a token on a side: Wan's, which the small model has too."""


@dataclasses.dataclass(frozen=True)
class VideoSize:
    width: int
    height: int
    frames: int

    @classmethod
    def parse(cls, text: str) -> VideoSize:
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text.strip().lower())
        if match is None:
            raise InvalidValueError(f"size={text} is not of the form WIDTHxHEIGHTxFRAMES; write for example 832x480x81")
        width, height, frames = map(int, match.groups())
        step = SPATIAL * PATCH
        if not width or not height or width % step or height % step or frames % TEMPORAL != 1:
            raise InvalidValueError(
                f"size={text}: width and height must be multiples of {step}, frames {TEMPORAL}n+1; try 832x480x81"
            )
        return cls(width, height, frames)

    def __str__(self) -> str:
        return f"{self.width}x{self.height}x{self.frames}"

    @property
    def latent(self) -> tuple[int, int, int]:
        """Frames, height, width."""
        return ((self.frames - 1) // TEMPORAL + 1, self.height // SPATIAL, self.width // SPATIAL)

    @property
    def tokens(self) -> int:
        frames, height, width = self.latent
        return frames * (height // PATCH) * (width // PATCH)


@dataclasses.dataclass(frozen=True)
class Model:
    """Configurations of the three components, as their config.json has them."""

    name: str
    transformer: Mapping[str, Any]
    text_encoder: Mapping[str, Any]
    vae: Mapping[str, Any]
    text_tokens: int
    sizes: tuple[VideoSize, ...]
    scaling_sizes: tuple[VideoSize, ...]
    """For step time against tokens."""
    scaling_devices: tuple[int, ...] = (1, 2, 4, 8)


_T5 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
_WAN = {
    "patch_size": (1, PATCH, PATCH),
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 1024,
}

FULL = Model(
    name="full",  # Wan 2.1 14B
    transformer=TRANSFORMER_14B,
    text_encoder={
        **_T5,
        "vocab_size": 256384,
        "d_model": 4096,
        "d_kv": 64,
        "d_ff": 10240,
        "num_layers": 24,
        "num_heads": 64,
    },
    vae={},
    text_tokens=512,
    sizes=(VideoSize(832, 480, 81), VideoSize(1280, 720, 81)),
    scaling_sizes=(
        VideoSize(416, 240, 81),  # 8,190 tokens
        VideoSize(576, 336, 81),  # 15,876
        VideoSize(832, 480, 81),  # 32,760
        VideoSize(1024, 576, 81),  # 48,384
        VideoSize(1280, 720, 81),  # 75,600
    ),
)

SMALL = Model(
    name="small",
    transformer={
        **_WAN,
        "num_attention_heads": 8,
        "attention_head_dim": 16,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 64,
        "freq_dim": 64,
        "ffn_dim": 256,
        "num_layers": 2,
    },
    text_encoder={**_T5, "vocab_size": 384, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
    vae={"base_dim": 8, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1},
    text_tokens=64,
    sizes=(VideoSize(96, 64, 9),),  # three latent frames: every program of the VAE
    scaling_sizes=(VideoSize(128, 128, 17), VideoSize(256, 128, 17), VideoSize(256, 256, 17), VideoSize(512, 256, 17)),
)

MODELS = {model.name: model for model in (FULL, SMALL)}


@dataclasses.dataclass(frozen=True)
class Choices:
    """What a user may choose. "auto" and empty: by the machine."""

    parts: tuple[str, ...] = PARTS
    sizes: tuple[VideoSize, ...] = ()
    peers: tuple[Peer, ...] = ()
    model: Literal["auto", "full", "small"] = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    repeats: int = 5
    steps: int = 10
    """Of the end-to-end part."""
    regional: bool = False
    """torch.compile of each block instead of the whole forward."""

    def __post_init__(self) -> None:
        for name in ("repeats", "steps"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidValueError(f"{name}={value!r} is not allowed; give a whole number from 1")
        possible = [peer for peer in PEERS if any(peer in PEERS_OF[part] for part in self.parts)]
        if self.peers and not set(self.peers) & set(possible):
            raise InvalidValueError(
                f"peers={','.join(self.peers)}: nothing would be measured in {', '.join(self.parts)}; "
                f"choose from {', '.join(possible)}"
            )

    @property
    def command(self) -> str:
        """What repeats the run, without where its results went."""
        words = ["comfy-tpu", "bench", "--what", ",".join(self.parts)]
        words += ["--size", *map(str, self.sizes)] if self.sizes else []
        words += ["--peers", ",".join(self.peers)] if self.peers else []
        for flag, value in (("model", self.model), ("dtype", self.dtype), ("repeats", self.repeats)):
            words += [f"--{flag}", str(value)] if value != getattr(Choices, flag) else []
        words += ["--steps", str(self.steps)] if "end-to-end" in self.parts else []
        words += ["--compile-regional"] if self.regional else []
        return " ".join(words)


@dataclasses.dataclass(frozen=True)
class Job:
    """One part at one size, for one process. Travels as JSON."""

    part: str
    model: str = "small"
    dtype: str = "float32"
    size: str = ""
    peers: tuple[str, ...] = ON_A_CPU
    repeats: int = 5
    steps: int = 10
    regional: bool = False
    cache_directory: str = ""
    """A fresh one for the part: what is compiled in it is compiled from nothing."""
    state: Literal["cold", "warm"] = "cold"
    """Whether the cache directory holds what an earlier process compiled."""
    inputs: str = ""
    """A directory with weights, latents and the video expected of them, where a process before has made them."""
    started: float = 0.0
    """time.time() when the process was asked for."""

    @property
    def video_size(self) -> VideoSize:
        return VideoSize.parse(self.size)

    @property
    def configurations(self) -> Model:
        return MODELS[self.model]

    @property
    def entrants(self) -> tuple[str, ...]:
        """Those of the chosen peers that this part has."""
        known = ("ours",) if self.part == DEVICES else PEERS_OF[self.part]
        return tuple(peer for peer in self.peers if peer in known)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Job:
        return cls(**{**entry, "peers": tuple(entry["peers"])})
