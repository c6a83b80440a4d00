"""Says what a video shows, by plain image analysis: nothing here is learned, so it cannot share a model's mistakes.

Background from the border, object by distance from it, colour by the nearest palette entry, shape by matching the
normalised mask with drawn outlines at every angle, motion from the tracks of centroid, area and angle. An attribute
that cannot be told is None: noise, an empty image, or an object that does something else than the grammar says.
"""

import math
from dataclasses import dataclass, fields
from functools import cache

import numpy as np
import torch

from tools.demo_model.captions import BACKGROUNDS, COLOURS, MOTIONS, SHAPES, Attributes
from tools.demo_model.clips import outline_coverage

COLOUR_DISTANCE_MAX = (
    0.22  # a palette entry farther than this from what is seen is not it; entries are at least 0.39 apart
)
PLAIN_SHARE_MIN = 0.90  # share of pixels that must be background, object, or a mix of both
OVERLAP_MIN = (
    0.74  # overlap with the best outline, below which a thing is none of the four shapes (drawn ones reach 0.9)
)
TRAVEL_MIN, REST_MAX = 10.0, 3.0  # pixels: farther is a motion, less is none (drawn motions cover 20 or more)
GROWTH_MIN, GROWTH_MAX_AT_REST = 1.8, 1.25  # area ratios, last to first: drawn ones are above 3.5, or 1
AREA_RATIO_MAX = (
    1.6  # largest to smallest area of a thing that is still: a decoder's first frame may be softer than the rest
)
TURN_MIN, TURN_MAX_AT_REST = 60.0, 20.0  # degrees: drawn spins cover 160 or more
_GRID = 40  # side of the normalised mask
_REACH = 1.6  # its half-width in units of the square root of the object's area


@dataclass(frozen=True)
class Observation:
    """The attributes that the scorer recognizes in a video; None for one that it cannot recognize."""

    colour: str | None = None
    shape: str | None = None
    motion: str | None = None
    background: str | None = None

    def agrees(self, wanted: Attributes) -> dict[str, bool]:
        """Whether each attribute agrees with the wanted one; attributes that the caption leaves out are left out."""
        names = [field.name for field in fields(self) if getattr(wanted, field.name) is not None]
        return {name: getattr(self, name) == getattr(wanted, name) for name in names}


def observe(video: np.ndarray) -> Observation:
    """Recognizes the attributes of a video [F, H, W, 3] in 0..1."""
    if video.ndim != 4 or video.shape[-1] != 3:
        raise ValueError(f"a video is an array [frames, height, width, 3], got {video.shape}")
    video = np.asarray(video, np.float64)
    if not np.isfinite(video).all():
        return Observation()
    plane = _background_colour(video)
    background = _nearest(plane, BACKGROUNDS)
    away = np.linalg.norm(video - plane, axis=-1)
    if background is None or (away > 0.25).sum() < 20 * len(video):
        return Observation(background=background)
    # The inside of the object: where it differs from the background about as much as it ever does.
    inside = away > 0.8 * np.quantile(away[away > 0.25], 0.75)
    paint = np.median(video[inside], axis=0)
    towards = paint - plane
    alpha = (video - plane) @ towards / (towards @ towards)
    residual = np.linalg.norm(video - plane - alpha.clip(0, 1)[..., None] * towards, axis=-1)
    # Twice the contrast about one half: soft edges of a decoder become those of a drawing, and areas stay as they are.
    alpha = (2 * alpha - 0.5).clip(0, 1) * (residual < COLOUR_DISTANCE_MAX)
    area = (alpha > 0.5).sum(axis=(1, 2))
    if (residual < COLOUR_DISTANCE_MAX).mean() < PLAIN_SHARE_MIN or area.min() < 20 or area.max() > 0.6 * alpha[0].size:
        return Observation(background=background)
    centre, area = _moments(alpha)
    shape, turned = _find_shape_and_turn(alpha, centre, area)
    colour = _nearest(paint, COLOURS)
    return Observation(colour, shape, _motion(centre, area, turned), background)


def edge_width(image: np.ndarray) -> float:
    """Width in pixels of the edges in an image [H, W, 3]: 1 in a drawing; nan where there is nothing but background.

    Along a straight ramp of width w, 4 a (1 - a) of the object's share a sums to 2 w / 3 where a itself changes by 1.
    """
    away = image - _background_colour(image[None])
    distance = np.linalg.norm(away, axis=-1)
    if distance.max() < COLOUR_DISTANCE_MAX:
        return math.nan
    towards = np.median(away[distance > 0.8 * distance.max()], axis=0)
    share = (away @ towards / (towards @ towards)).clip(0, 1)
    share = np.where(share < 0.05, 0, share)  # faint traces of the decoder
    return 1.5 * float((4 * share * (1 - share)).sum() / np.hypot(*np.gradient(share)).sum())


def _background_colour(video: np.ndarray) -> np.ndarray:
    border = [video[:, :2], video[:, -2:], video[:, :, :2].swapaxes(1, 2), video[:, :, -2:].swapaxes(1, 2)]
    return np.median(np.concatenate([edge.reshape(-1, 3) for edge in border]), axis=0)


def _nearest(colour: np.ndarray, palette: dict[str, tuple[float, float, float]]) -> str | None:
    distance = {name: float(np.linalg.norm(colour - np.array(entry))) for name, entry in palette.items()}
    name = min(distance, key=lambda entry: distance[entry])
    return name if distance[name] < COLOUR_DISTANCE_MAX else None


def _moments(alpha: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Centroids [F, 2] as x, y in pixels, and areas [F]."""
    weight = np.where(alpha > 0.15, alpha, 0)  # faint traces of the decoder all over the image would pull it inwards
    area = weight.sum(axis=(1, 2))
    x = (weight.sum(axis=1) * (np.arange(weight.shape[2]) + 0.5)).sum(axis=1) / area
    y = (weight.sum(axis=2) * (np.arange(weight.shape[1]) + 0.5)).sum(axis=1) / area
    return np.stack([x, y], -1), area


@cache
def _outlines() -> tuple[np.ndarray, list[tuple[str, float, float]]]:
    """Normalised masks [K, GRID, GRID] of every shape at every angle; for each its name, angle and period (degrees)."""
    entries = [("circle", "left", 0.0, 0.0)]
    for name, period in (("circle", 360), ("square", 90), ("triangle", 120), ("star", 72)):
        entries += [(name, "spinning", float(angle), float(period)) for angle in range(0, period, 4)]
    shape = torch.tensor([SHAPES.index(entry[0]) for entry in entries])
    motion = torch.tensor([MOTIONS.index(entry[1]) for entry in entries])
    angle = torch.tensor([math.radians(entry[2]) for entry in entries])[:, None]
    count, side = len(entries), 128
    centre, radius = torch.full((count, 1, 2), side / 2), torch.full((count, 1), side / 3.2)
    drawn = outline_coverage(shape, motion, centre, radius, angle, size=side)[:, 0].double().numpy()
    masks = _normalise(drawn, *_moments(drawn)).astype(np.float32)
    return masks, [(name, angle, period) for name, _, angle, period in entries]


def _normalise(alpha: np.ndarray, centre: np.ndarray, area: np.ndarray) -> np.ndarray:
    """Each frame's mask about its centroid at a common area, bilinear, [F, GRID, GRID]."""
    steps = np.linspace(-_REACH, _REACH, _GRID) * np.sqrt(area)[:, None] / math.sqrt(math.pi)
    limit_y, limit_x = alpha.shape[1] - 1.001, alpha.shape[2] - 1.001
    x, y = centre[:, :1] + steps - 0.5, centre[:, 1:] + steps - 0.5
    within = ((y > -0.5) & (y < limit_y + 0.5))[:, :, None] & ((x > -0.5) & (x < limit_x + 0.5))[:, None, :]
    x, y = x.clip(0, limit_x), y.clip(0, limit_y)
    left, top = x.astype(int), y.astype(int)
    part_x, part_y = (x - left)[:, None, :], (y - top)[:, :, None]
    frame = np.arange(len(alpha))[:, None, None]
    row, column = top[:, :, None], left[:, None, :]
    above = alpha[frame, row, column] * (1 - part_x) + alpha[frame, row, column + 1] * part_x
    below = alpha[frame, row + 1, column] * (1 - part_x) + alpha[frame, row + 1, column + 1] * part_x
    return (above * (1 - part_y) + below * part_y) * within


def _find_shape_and_turn(alpha: np.ndarray, centre: np.ndarray, area: np.ndarray) -> tuple[str | None, float | None]:
    """The shape over all frames, and by how many degrees it turned; None for the angle where it has none."""
    outlines, entries = _outlines()
    masks = _normalise(alpha, centre, area).astype(np.float32)
    flat, known = masks.reshape(len(masks), 1, -1), outlines.reshape(1, len(outlines), -1)
    # Soft intersection over union, from sums: min = (a + b - |a - b|) / 2.
    total = flat.sum(-1) + known.sum(-1)
    gap = np.abs(flat - known).sum(-1)
    overlap = (total - gap) / (total + gap)
    kind = np.array([f"{name} {'marked' if period == 360 else ''}" for name, _, period in entries])
    # Larger frames show the outline better, so they weigh more.
    weight = area / area.sum()
    means = {name: float(weight @ overlap[:, kind == name].max(axis=1)) for name in dict.fromkeys(kind)}
    best = max(means, key=lambda name: means[name])
    shape = best.split()[0] if means[best] >= OVERLAP_MIN else None
    period = next(entry[2] for entry, name in zip(entries, kind, strict=True) if name == best)
    if period == 0:
        return shape, None
    chosen = [index for index, name in enumerate(kind) if name == best]
    angles = np.array([entries[chosen[column]][1] for column in overlap[:, chosen].argmax(axis=1)])
    unwrapped = np.unwrap(angles, period=period)
    return shape, float(unwrapped[-1] - unwrapped[0])


def _motion(centre: np.ndarray, area: np.ndarray, turned: float | None) -> str | None:
    """One motion only: an object that travels and swells and turns shows none of the eight."""
    step_x, step_y = centre[-1] - centre[0]
    travelled = max(abs(step_x), abs(step_y))
    astray = float(np.abs(centre - centre[0]).max())
    ratio = float(area[-2:].mean() / area[:2].mean())
    steady = 1 / GROWTH_MAX_AT_REST < ratio < GROWTH_MAX_AT_REST
    turning = turned is not None and abs(turned) > TURN_MIN
    if turning:
        # The centroid of a disc with a wedge goes round the disc's middle: up to 7 pixels for the largest one.
        return "spinning" if steady and travelled < TRAVEL_MIN else None
    if travelled > TRAVEL_MIN and min(abs(step_x), abs(step_y)) < travelled / 2 and steady:
        horizontal = abs(step_x) > abs(step_y)
        forwards = (step_x if horizontal else step_y) > 0
        return {(True, True): "right", (True, False): "left", (False, True): "down"}.get((horizontal, forwards), "up")
    if travelled < TRAVEL_MIN and not 1 / GROWTH_MIN < ratio < GROWTH_MIN:
        return "growing" if ratio > 1 else "shrinking"
    level = turned is None or abs(turned) < TURN_MAX_AT_REST
    steady = steady and area.max() < AREA_RATIO_MAX * area.min()
    return "still" if astray < REST_MAX and steady and level else None
