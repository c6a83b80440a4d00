"""The texts of a page of results: English ones are here, those of other languages in locales/*/performance.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from comfy_tpu.distribution import find_locale, restore_command
from comfy_tpu.errors import InvalidValueError, UnsupportedError
from comfy_tpu.json_input import read_json

Language = Literal["en", "zh-CN"]
LANGUAGES: tuple[Language, ...] = get_args(Language)
_LOCALES: Mapping[Language, str] = {"zh-CN": "zh"}
_FILE = "performance.json"


@dataclasses.dataclass(frozen=True)
class FigureTexts:
    """The section about figures that others reported."""

    heading: str
    introduction: str
    """With {model}, {steps} and {size}."""
    columns: Sequence[str]
    whats: Mapping[str, str]
    """By `Figure.what`."""
    unnamed: str
    """The size of a figure whose document does not name it."""


@dataclasses.dataclass(frozen=True)
class PageTexts:
    """All texts of a page, in one language."""

    language: Language
    name: str
    """The language's name in that language."""
    head: str
    """The title, and what comes before the first section."""
    figures: FigureTexts
    translations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """By the English text. Names in the results themselves (`forward`, `diffusers eager`) are not translated."""

    @property
    def is_english(self) -> bool:
        return self.language == "en"

    def translate(self, text: str) -> str:
        """Raises InvalidValueError for a text that has no translation."""
        if self.is_english:
            return text
        if text not in self.translations:
            place = f"locales/{_LOCALES[self.language]}/{_FILE}"
            raise InvalidValueError(f"{text!r} has no translation into {self.language}; add it to {place}")
        return self.translations[text]


def read_texts(language: Language) -> PageTexts:
    """Raises UnsupportedError where the file of another language than English is missing or damaged."""
    if language == "en":
        return ENGLISH
    path = find_locale(_LOCALES[language], _FILE)
    try:
        content: dict[str, Any] = read_json(path)
    except (OSError, ValueError) as error:
        message = f"a page in {language} needs {path}, which cannot be read: {error}"
        raise UnsupportedError(f"{message}; restore it: {restore_command('locales')}") from error
    figures = content["figures"]
    return PageTexts(
        language=language,
        name=content["name"],
        head="\n".join(content["head"]),
        figures=FigureTexts(**{**figures, "introduction": "\n".join(figures["introduction"])}),
        translations=content["translations"],
    )


_HEAD = """# Performance

Made by `comfy-tpu bench report` from the JSON files of `comfy-tpu bench`; change the measurements, not this page.

Seconds are wall time with the device waited for: medians of the samples after a warm-up call, smallest and largest
beside them. Peers of a row run in one process with the same weights, in turns; "ours is faster" compares within that
run only, and so do "fp8 is faster" and "fast is faster", with ours without loss. Weights are random. TFLOP/s count
products, convolutions and attention; "of the floor" is how near a forward comes to one whose products and attention
each run at the best rate measured beside it (of 8-bit products none is). The error is the norm of the difference from a
float32 reference over the norm of the reference; the transformer's is that of two of its blocks at their full width,
because a float32 copy of a large model does not fit beside the others.
"""
_FIGURES = """\
This project has not measured a TPU. The two documents below did, on a v6e-8 with their own code, {model},
81 frames and {steps} steps. On such a machine the command of a row measures the same with ours; `--json
benchmarks/results/v6e-8.json` keeps the result, and `make performance` puts it on this page. What a step takes by the
TPU compiler's schedules, without a TPU, is an estimate, and stands in [plan.md](plan.md).

* **Transformer**: with `dp=2` a forward has both branches of the guidance, so its median is a step, and {steps} of
  them are the later run. The first run is the row's first call.
* **VAE, cold and warm** are the rows `vae decode, cold` and `vae decode, warm` of the part `compile`; the decode
  is the part `vae`. The second document names no size; {size} is taken, where the first has nearly the same figures."""

ENGLISH = PageTexts(
    language="en",
    name="English",
    head=_HEAD,
    figures=FigureTexts(
        heading="Reported for TPU v6e-8, and how to measure it",
        introduction=_FIGURES,
        columns=("what", "size", "mesh", "VAE by", "first run", "later runs", "a step", "measured with"),
        whats={
            "text": "text encoder",
            "transformer": "transformer",
            "vae": "VAE",
            "end-to-end": "all of it",
            "vae, cold": "VAE, empty cache",
            "vae, warm": "VAE, from the cache",
        },
        unnamed="not named",
    ),
)
