"""Drawn clips: one coloured shape on a plain background, one motion, 17 frames. Vectorised torch, on any device.

An outline is a signed distance in pixels, and a pixel's coverage is a half minus that distance, clamped: anti-aliased
edges at the cost of one evaluation, where supersampling would need several.
"""

import math
import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tools.demo_model.captions import (
    BACKGROUNDS,
    COLOURS,
    HELD_OUT_TRIPLES,
    MOTIONS,
    SHAPES,
    TRAINING_TRIPLES,
    Attributes,
    paraphrase,
)

SIZE = 64
FRAMES = 17

# Corners, and the radius of the inner corner over that of the outer one: a regular polygon where it is cos(pi/n).
_CORNERS = {"square": (4, math.cos(math.pi / 4)), "triangle": (3, math.cos(math.pi / 3)), "star": (5, 0.45)}
# Outer radius over nominal radius, so that all shapes look about equally large.
_SCALE = {"circle": 1.0, "square": 1.2, "triangle": 1.35, "star": 1.3}
# First corner: up, except that a square stands on its side.
_UPRIGHT = {"circle": -math.pi / 2, "square": math.pi / 4, "triangle": -math.pi / 2, "star": -math.pi / 2}
# A disc looks the same however it is turned, so the spinning one has a wedge cut out of it.
WEDGE = math.radians(40)  # half the opening
_EDGE = 2.5  # pixels from a corner to the border, at least: a sharp corner's soft edge reaches 1.6 beyond it


@dataclass(frozen=True)
class ClipBatch:
    """What to draw, one row a clip; indices follow the order of the grammar."""

    colour: Tensor  # [B] int64
    shape: Tensor  # [B]
    motion: Tensor  # [B]
    background: Tensor  # [B]
    centre: Tensor  # [B, F, 2] pixels, x then y
    radius: Tensor  # [B, F] nominal radius in pixels
    angle: Tensor  # [B, F] radians, clockwise

    def attributes(self, row: int) -> Attributes:
        return Attributes(
            list(COLOURS)[self.colour[row]],
            SHAPES[self.shape[row]],
            MOTIONS[self.motion[row]],
            list(BACKGROUNDS)[self.background[row]],
        )


def sample_training(count: int, generator: torch.Generator, centred: float = 0.0, spinning: float = 0.0) -> ClipBatch:
    """Clips of random training triples; a held-out one never comes out.

    A share of them begins centred. A share of them is spinning, beside those that come out so by chance.
    """
    indices = _indices(TRAINING_TRIPLES, count, generator)
    if spinning:
        spins = _indices([triple for triple in TRAINING_TRIPLES if triple[2] == "spinning"], count, generator)
        chosen = torch.rand(count, generator=generator, device=generator.device) < spinning
        indices = torch.where(chosen[:, None], spins, indices)
    return _sample(indices, generator, centred)


def sample_held_out(count: int, generator: torch.Generator) -> ClipBatch:
    return _sample(_indices(HELD_OUT_TRIPLES, count, generator), generator)


def make_clips(attributes: list[Attributes], generator: torch.Generator, centred: float = 0.0) -> ClipBatch:
    """One clip for each; where the background is None it is drawn at random."""
    device = generator.device
    rows = [(list(COLOURS).index(a.colour), SHAPES.index(a.shape), MOTIONS.index(a.motion)) for a in attributes]
    batch = _sample(torch.tensor(rows, device=device), generator, centred)
    for row, wanted in enumerate(attributes):
        if wanted.background is not None:
            batch.background[row] = list(BACKGROUNDS).index(wanted.background)
    return batch


def draw(batch: ClipBatch) -> Tensor:
    """Videos [B, 3, F, SIZE, SIZE] in 0..1, float32, on the batch's device."""
    coverage = outline_coverage(batch.shape, batch.motion, batch.centre, batch.radius, batch.angle)[:, None]
    device = coverage.device
    colour = torch.tensor(list(COLOURS.values()), device=device)[batch.colour][:, :, None, None, None]
    background = torch.tensor(list(BACKGROUNDS.values()), device=device)[batch.background][:, :, None, None, None]
    return background + coverage * (colour - background)


def outline_coverage(
    shape: Tensor, motion: Tensor, centre: Tensor, radius: Tensor, angle: Tensor, size: int = SIZE
) -> Tensor:
    """How much of each pixel the shape covers, [B, frames, size, size] in 0..1."""
    device = shape.device
    axis = torch.arange(size, device=device) + 0.5
    x = axis - centre[..., 0, None, None]  # [B, frames, 1, size]
    y = axis[:, None] - centre[..., 1, None, None]  # [B, frames, size, 1]
    upright = torch.tensor([_UPRIGHT[name] for name in SHAPES], device=device)[shape][:, None]
    scale = torch.tensor([_SCALE[name] for name in SHAPES], device=device)[shape][:, None]
    turn = (angle + upright)[..., None, None]
    outer = (radius * scale)[..., None, None]
    distance = torch.hypot(x, y)
    theta = torch.atan2(y, x) - turn

    corners = torch.tensor([float(_CORNERS.get(name, (1, 1))[0]) for name in SHAPES], device=device)[shape]
    inner = torch.tensor([float(_CORNERS.get(name, (1, 1))[1]) for name in SHAPES], device=device)[shape]
    # Fold the plane into half of one corner's sector; there the outline is one straight line, from the outer corner
    # (outer, 0) to the inner one at half the sector's angle.
    half = (math.pi / corners)[:, None, None, None]
    folded = (torch.remainder(theta + half, 2 * half) - half).abs()
    run = inner[:, None, None, None] * torch.cos(half) - 1
    rise = inner[:, None, None, None] * torch.sin(half)
    along_x, along_y = distance * torch.cos(folded) - outer, distance * torch.sin(folded)
    polygon = (along_x * rise - along_y * run) / torch.hypot(run, rise)

    away = torch.remainder(theta + math.pi, 2 * math.pi) - math.pi
    wedge = distance * torch.sin((WEDGE - away.abs()).clamp(min=-math.pi / 2))
    disc = distance - outer
    cut = (motion == MOTIONS.index("spinning"))[:, None, None, None]
    disc = torch.where(cut, torch.maximum(disc, wedge), disc)

    round_one = (shape == SHAPES.index("circle"))[:, None, None, None]
    return (0.5 - torch.where(round_one, disc, polygon)).clamp(0, 1)


def evaluation_prompts(count: int, held_out_count: int, seed: int) -> list[tuple[str, Attributes]]:
    """Paraphrased prompts, the last ``held_out_count`` of them of triples that training never saw.

    A triple comes again, in other words, only after all of its kind have come; every second prompt names a background.
    """
    rng = random.Random(seed)
    seen_count = count - held_out_count
    triples = _draw_evenly(TRAINING_TRIPLES, seen_count, rng) + _draw_evenly(HELD_OUT_TRIPLES, held_out_count, rng)
    wanted = [
        Attributes(*triple, background=rng.choice(list(BACKGROUNDS)) if number % 2 == 0 else None)
        for number, triple in enumerate(triples)
    ]
    return [(paraphrase(attributes, rng), attributes) for attributes in wanted]


def _draw_evenly(triples: list[tuple[str, str, str]], count: int, rng: random.Random) -> list[tuple[str, str, str]]:
    rounds, rest = divmod(count, len(triples))
    drawn = [triple for _ in range(rounds) for triple in rng.sample(triples, len(triples))]
    return drawn + rng.sample(triples, rest)


def _indices(triples: list[tuple[str, str, str]], count: int, generator: torch.Generator) -> Tensor:
    rows = [(list(COLOURS).index(colour), SHAPES.index(s), MOTIONS.index(m)) for colour, s, m in triples]
    chosen = torch.randint(len(rows), (count,), generator=generator, device=generator.device)
    return torch.tensor(rows, device=generator.device)[chosen]


def _sample(indices: Tensor, generator: torch.Generator, centred: float = 0.0) -> ClipBatch:
    tracks = _sample_tracks(indices, generator)
    if centred:
        tracks = _sample_centred_tracks(tracks, centred, generator)
    return tracks.at(torch.arange(FRAMES, device=indices.device).expand(len(indices), -1), FRAMES)


@dataclass(frozen=True)
class Tracks:
    """What things do in the course of a video, one row a video."""

    colour: Tensor  # [B] int64, and so the next three
    shape: Tensor
    motion: Tensor
    background: Tensor
    begin: Tensor  # [B, 2] the centre in the first frame, pixels, x then y
    end: Tensor  # [B, 2] and in the last one
    radius: Tensor  # [B, 2] the first and the last
    turn: Tensor  # [B] radians, all in all

    def at(self, frames: Tensor, length: int | Tensor) -> ClipBatch:
        """Some frames [B, F] of videos that have as many as ``length`` says: the longer, the slower things go."""
        progress = (frames / (torch.as_tensor(length, device=frames.device).view(-1, 1) - 1)).clamp(0, 1)
        first, last = self.radius.unbind(1)
        return ClipBatch(
            self.colour,
            self.shape,
            self.motion,
            self.background,
            self.begin[:, None] + (self.end - self.begin)[:, None] * progress[..., None],
            first[:, None] + (last - first)[:, None] * progress,
            self.turn[:, None] * progress,
        )


def sample_training_tracks(count: int, generator: torch.Generator) -> Tracks:
    """Of random training triples; a held-out one never comes out."""
    return _sample_tracks(_indices(TRAINING_TRIPLES, count, generator), generator)


def _sample_tracks(indices: Tensor, generator: torch.Generator) -> Tracks:
    """Positions, sizes and speeds for the triples; nothing leaves the image and every motion is plainly visible."""
    colour, shape, motion = indices.unbind(1)
    device, count = indices.device, len(indices)

    def uniform(low: float | Tensor, high: float | Tensor) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=generator, device=device)

    def of(*names: str) -> Tensor:
        return torch.isin(motion, torch.tensor([MOTIONS.index(name) for name in names], device=device))

    travels, swells = of("left", "right", "up", "down"), of("growing", "shrinking")
    background = torch.randint(len(BACKGROUNDS), (count,), generator=generator, device=device)
    scale = torch.tensor([_SCALE[name] for name in SHAPES], device=device)[shape]

    steady = torch.where(travels, uniform(10, 13), uniform(12, 17))
    # Not smaller: of a growing star's first frame with a radius of 6 a decoder leaves no points.
    small, large = uniform(7.5, 9), uniform(17, 18.5)
    first = torch.where(of("growing"), small, torch.where(of("shrinking"), large, steady))
    last = torch.where(of("growing"), large, torch.where(of("shrinking"), small, steady))

    margin = torch.where(swells, large, steady) * scale + _EDGE
    room = SIZE - 2 * margin
    # At least 20 pixels: a third of the image.
    distance = uniform(torch.full_like(room, 20.0), room)
    start = margin + uniform(torch.zeros_like(room), room - distance)
    reverse = of("left", "up")
    begin, end = torch.where(reverse, start + distance, start), torch.where(reverse, start, start + distance)
    rest_x, rest_y = uniform(margin, SIZE - margin), uniform(margin, SIZE - margin)
    across, upright = of("left", "right"), of("up", "down")

    def place(along: Tensor) -> Tensor:
        return torch.stack([torch.where(across, along, rest_x), torch.where(upright, along, rest_y)], -1)

    # 10 to 13 degrees a frame of a clip: a star repeats after 72, and half of that is never passed between two frames.
    turn = (FRAMES - 1) * uniform(math.radians(10), math.radians(13)) * of("spinning")
    radius = torch.stack([first, last], 1)
    return Tracks(colour, shape, motion, background, place(begin), place(end), radius, turn)


def _sample_centred_tracks(tracks: Tracks, share: float, generator: torch.Generator) -> Tracks:
    """For a share of the clips another track: a thing of middling size begins in the middle, whatever it will do.

    Such a first frame says nothing of the motion, but that a circle with a wedge will spin.
    """
    device, count = tracks.motion.device, len(tracks.motion)

    def uniform(low: float | Tensor, high: float | Tensor) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=generator, device=device)

    def by_motion(values: dict[str, tuple[float, float]], otherwise: tuple[float, float]) -> Tensor:
        return torch.tensor([values.get(name, otherwise) for name in MOTIONS], device=device)[tracks.motion]

    first = uniform(8, 9.5)
    factor = uniform(*by_motion({"growing": (1.75, 1.85), "shrinking": (0.5, 0.57)}, (1.0, 1.0)).unbind(1))
    jitter = 0.7
    middle = SIZE / 2 + torch.stack([uniform(-jitter, jitter), uniform(-jitter, jitter)], -1)
    scale = torch.tensor([_SCALE[name] for name in SHAPES], device=device)[tracks.shape]
    room = SIZE / 2 - jitter - first * scale - _EDGE
    ways = {"left": (-1.0, 0.0), "right": (1.0, 0.0), "up": (0.0, -1.0), "down": (0.0, 1.0)}
    travel = uniform(torch.full_like(room, 14.0), room)[:, None] * by_motion(ways, (0.0, 0.0))
    chosen = (uniform(0, 1) < share)[:, None]
    return replace(
        tracks,
        begin=torch.where(chosen, middle, tracks.begin),
        end=torch.where(chosen, middle + travel, tracks.end),
        radius=torch.where(chosen, torch.stack([first, first * factor], 1), tracks.radius),
    )
