"""The texts that nodes show, as keys and values: in English here, and in the user's language in the browser."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

ENGLISH = {
    "node.loading": "loading {model}",
    "node.loading_bytes": "loading {part} {done} of {total}",
    "node.preparing": "preparing",
    "node.preparing_size": "preparing for {size}",
    "node.compiling": "compiling (first run)",
    "node.compiling_size": "compiling (first run at {size})",
    "node.encoding_prompt": "encoding the prompt",
    "node.encoding_image": "encoding the image",
    "node.denoising": "step {done}/{total}",
    "node.decoding": "decoding {done}/{total}",
    "node.done": "done in {time}",
    "node.cancelled": "cancelled after {time}",
    "node.failed": "failed after {time}",
    "node.connecting": "connecting to {server}",
    "node.server_gone": "{server} does not answer; waiting {time}",
    "node.fixed_size": "{model} always draws {size}",
    "node.own": "the model's own: {settings}",
    "size.image": "{width}×{height}",
    "size.video": "{width}×{height}, {frames} frames",
    "size.tokens": "{count} tokens",
    "seconds_per_step": "{seconds} s/step",
    "left": "{time} left",
    "seconds": "{seconds} s",
    "info.device": "1 {platform} device",
    "info.devices": "{count} {platform} devices",
    "info.memory": "{id}: {kind}, weights {weights}",
    "info.memory_used": "{id}: {kind}, weights {weights}, in use {used} of {limit}",
    "info.resident": "resident: {name}, {size}",
    "info.model_part": "{model} {part}",
    "info.nothing_resident": "resident: nothing",
    "info.sharding": "  mesh {mesh}: {tensors} tensors, {size}, {per_device} of it on each device; "
    "{sharded} split ({sharded_size}), {gathered} stored in pieces and gathered ({gathered_size}), "
    "{replicated} replicated ({replicated_size})",
    "info.could_not_split": "  could not be split, because no dimension divides: {names}",
    "info.programs": "programs: {count} compiled in {seconds} s, {cached} from the cache",
    "info.steps": "last steps: {seconds} s each",
    "info.on_host": "on the host: {what}: {reason}",
    "info.on_host_node": "on the host: {what} (node {node}): {reason}",
    "part.transformer": "transformer",
    "part.transformer_2": "second transformer",
    "part.text_encoder": "text encoder",
    "part.text_encoder_2": "second text encoder",
    "part.image_encoder": "image encoder",
    "part.vae": "VAE",
}
"""Equal to those of locales/en/main.json, which a wheel does not have; a test compares them."""
SEPARATOR = " · "

_SIZE = re.compile(r"(\d+)×(\d+)(?:×(\d+))?")
_TOKENS = re.compile(r"(\d+) tokens")


@dataclasses.dataclass(frozen=True)
class NodeText:
    """A sentence with values, each of which may be a sentence itself."""

    key: str
    values: Mapping[str, str | NodeText] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        """In English."""
        return ENGLISH[self.key].format_map({name: str(value) for name, value in self.values.items()})

    def as_dict(self) -> dict[str, Any]:
        values = {
            name: value.as_dict() if isinstance(value, NodeText) else value for name, value in self.values.items()
        }
        return {"key": self.key, "values": values}


NodeLine = Sequence[str | NodeText]
"""Texts that are shown in one line, with separators."""


def join_line(line: NodeLine) -> str:
    return SEPARATOR.join(map(str, line))


def lines_as_json(lines: Sequence[NodeLine]) -> list[list[Any]]:
    """What the browser translates."""
    return [[word.as_dict() if isinstance(word, NodeText) else word for word in line] for line in lines]


def size_text(size: str) -> str | NodeText:
    """The size of a progress report in words: "832×480×81" -> 832×480, 81 frames."""
    if match := _SIZE.fullmatch(size):
        width, height, frames = match.groups()
        if frames is None or frames == "1":
            return NodeText("size.image", {"width": width, "height": height})
        return NodeText("size.video", {"width": width, "height": height, "frames": frames})
    if match := _TOKENS.fullmatch(size):
        return NodeText("size.tokens", {"count": match[1]})
    return size


def part_text(part: str) -> str | NodeText:
    """A component in words; one that only its family knows, by its name."""
    return NodeText(f"part.{part}") if f"part.{part}" in ENGLISH else part.replace("_", " ")


def duration_text(seconds: float) -> str | NodeText:
    """ "12.3 s", or from a minute on "1:04"."""
    return clock_time(seconds) if seconds >= 60 else NodeText("seconds", {"seconds": f"{seconds:.1f}"})


def clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
