"""The grammar of the demo model: what a clip can show, how a caption says it, and which triples training never sees.

Captions are paraphrased (synonyms, word order, optional article and background) and parse back to what they say.
"""

import random
import re
from dataclasses import dataclass
from itertools import product

# RGB in 0..1. Far enough apart that the nearest entry is the right one even after the VAE:
# the closest two colours are 0.41 apart, and no colour is nearer than 0.49 to a background.
COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.90, 0.10, 0.10),
    "green": (0.10, 0.70, 0.15),
    "blue": (0.10, 0.25, 0.95),
    "yellow": (0.98, 0.90, 0.10),
    "orange": (1.00, 0.50, 0.00),
    "purple": (0.50, 0.08, 0.75),
    "pink": (1.00, 0.45, 0.75),
    "cyan": (0.10, 0.85, 0.90),
}
BACKGROUNDS: dict[str, tuple[float, float, float]] = {
    "black": (0.03, 0.03, 0.03),
    "white": (0.97, 0.97, 0.97),
    "gray": (0.50, 0.50, 0.50),
    "brown": (0.36, 0.22, 0.10),
}
SHAPES = ("circle", "square", "triangle", "star")
MOTIONS = ("left", "right", "up", "down", "still", "growing", "shrinking", "spinning")

# The first entry of each list is the plain way to say it.
COLOUR_WORDS = {name: [name] for name in COLOURS} | {"purple": ["purple", "violet"], "cyan": ["cyan", "turquoise"]}
BACKGROUND_WORDS = {name: [name] for name in BACKGROUNDS} | {"gray": ["gray", "grey"]}
SHAPE_WORDS = {
    "circle": ["circle", "disc", "disk", "ball"],
    "square": ["square", "box"],
    "triangle": ["triangle"],
    "star": ["star"],
}
_TOWARDS = ["moving {}", "sliding {}", "going {}", "drifting {}", "moving to the {}", "going to the {}"]
_TOWARDS += ["moving {}ward", "drifting {}wards", "moves {}", "goes {}", "slides to the {}", "moves to the {}"]
_VERTICAL = ["moving {}", "sliding {}", "going {}", "drifting {}", "moving {}ward", "drifting {}wards", "moves {}"]
_VERTICAL += ["goes {}", "slides {}"]
MOTION_WORDS = {
    "left": [phrase.format("left") for phrase in _TOWARDS],
    "right": [phrase.format("right") for phrase in _TOWARDS],
    "up": [*(phrase.format("up") for phrase in _VERTICAL), "rising", "rises", "flying up"],
    "down": [*(phrase.format("down") for phrase in _VERTICAL), "falling", "falls", "sinking"],
    "still": ["standing still", "not moving", "staying in place", "that does not move", "stands still", "motionless"],
    "growing": ["growing", "getting bigger", "expanding", "grows", "getting larger", "becoming bigger"],
    "shrinking": ["shrinking", "getting smaller", "contracting", "shrinks", "becoming smaller"],
    "spinning": ["spinning", "rotating", "turning around", "spins", "rotates", "spinning around", "turning"],
}
# Forms that can stand before the noun: "a spinning red star".
_ADJECTIVES = {"still": "motionless"} | {motion: motion for motion in ("growing", "shrinking", "spinning")}
_OPENINGS = ["a video of", "a clip of", "an animation of", "video of", "this is", "there is"]
# Said of any clip, so they mean nothing: the model learns to pass over such words.
_FILLERS = ["small", "bright", "solid", "simple", "nice", "flat", "big", "plain"]


@dataclass(frozen=True)
class Attributes:
    """What one clip shows. A caption without a background has ``background=None``."""

    colour: str
    shape: str
    motion: str
    background: str | None

    @property
    def triple(self) -> tuple[str, str, str]:
        return self.colour, self.shape, self.motion


def is_held_out(colour: str, shape: str, motion: str) -> bool:
    """Whether training never sees this triple: 32 of 256, one colour for every pair of shape and motion.

    Every pair of attributes is still seen in training with some third one: what is held out is the combination.
    """
    rank = list(COLOURS).index(colour) + 3 * SHAPES.index(shape) + 5 * MOTIONS.index(motion)
    return rank % 8 == 0


TRIPLES = list(product(COLOURS, SHAPES, MOTIONS))
TRAINING_TRIPLES = [triple for triple in TRIPLES if not is_held_out(*triple)]
HELD_OUT_TRIPLES = [triple for triple in TRIPLES if is_held_out(*triple)]


def plain_caption(attributes: Attributes) -> str:
    """The caption as the documentation writes it: "a red circle moving left on a black background"."""
    article = "an" if attributes.colour[0] in "aeiou" else "a"
    caption = f"{article} {attributes.colour} {attributes.shape} {MOTION_WORDS[attributes.motion][0]}"
    return caption if attributes.background is None else f"{caption} on a {attributes.background} background"


def paraphrase(attributes: Attributes, rng: random.Random) -> str:
    """One of the ways to say it; the background only if ``attributes`` names one."""
    colour = rng.choice(COLOUR_WORDS[attributes.colour])
    shape = rng.choice(SHAPE_WORDS[attributes.shape])
    motion = rng.choice(MOTION_WORDS[attributes.motion])
    if rng.random() < 0.3:  # often enough the plain words, which people type
        colour, shape, motion = attributes.colour, attributes.shape, MOTION_WORDS[attributes.motion][0]
    noun = f"{colour} {shape}"
    if rng.random() < 0.15:
        noun = f"{rng.choice(_FILLERS)} {noun}"
    if attributes.motion in _ADJECTIVES and rng.random() < 0.2:
        body = f"{_ADJECTIVES[attributes.motion]} {noun}"
    elif rng.random() < 0.12:
        body = f"{shape} in {colour} {motion}"
    elif rng.random() < 0.12:
        body = f"{noun}, {motion}"
    elif rng.random() < 0.1:
        body = f"{noun} which is {motion}" if motion.split()[0].endswith("ing") else f"{noun} {motion}"
    else:
        body = f"{noun} {motion}"
    if rng.random() < 0.75:
        body = f"{rng.choice(['the', 'one'])} {body}" if rng.random() < 0.1 else f"{_article(body)} {body}"
    if rng.random() < 0.12:
        body = f"{rng.choice(_OPENINGS)} {body}"
    if attributes.background is not None:
        body = _with_background(body, rng.choice(BACKGROUND_WORDS[attributes.background]), rng)
    if rng.random() < 0.15:
        body += "."
    return body[0].upper() + body[1:] if rng.random() < 0.2 else body


def parse(caption: str) -> Attributes:
    """Read a caption of the grammar back. Raises ValueError where an attribute is missing or said twice."""
    words = " ".join(re.findall(r"[a-z]+", caption.lower()))
    found = {
        "colour": _find_mentioned(words, COLOUR_WORDS),
        "shape": _find_mentioned(words, SHAPE_WORDS),
        "motion": _find_mentioned(words, MOTION_WORDS),
        "background": _find_mentioned(words, BACKGROUND_WORDS),
    }
    for name, values in found.items():
        if len(values) > 1 or (not values and name != "background"):
            raise ValueError(f"{caption!r} names {sorted(values) or 'no'} {name}; expected exactly one")
    return Attributes(*(next(iter(values), None) for values in found.values()))


def vocabulary() -> list[str]:
    """Every word that a caption can hold, in a fixed order."""
    phrases = [*_OPENINGS, *_FILLERS, *_FRONT, *_BEHIND, "a an the one in which is , ."]
    for words in (COLOUR_WORDS, SHAPE_WORDS, MOTION_WORDS, BACKGROUND_WORDS):
        phrases += [phrase for synonyms in words.values() for phrase in synonyms]
    return sorted({word for phrase in phrases for word in re.findall(r"[a-z]+|[.,]", phrase)})


_BEHIND = ["on a {} background", "on {}", "over a {} background", "against a {} background", "in front of a {} wall"]
_FRONT = ["on a {} background,", "on {},", "{} background,"]


def _with_background(body: str, background: str, rng: random.Random) -> str:
    if rng.random() < 0.15:
        return f"{rng.choice(_FRONT).format(background)} {body}"
    behind = _BEHIND[0] if rng.random() < 0.5 else rng.choice(_BEHIND)
    return f"{body} {behind.format(background)}"


def _article(words: str) -> str:
    return "an" if words[0] in "aeiou" else "a"


def _find_mentioned(words: str, synonyms: dict[str, list[str]]) -> set[str]:
    return {name for name, phrases in synonyms.items() if any(re.search(rf"\b{phrase}\b", words) for phrase in phrases)}
