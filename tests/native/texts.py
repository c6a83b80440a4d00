"""Small text encoders with random weights, put together by ComfyUI's own code for the real ones, widths excepted."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import io
import types
from typing import TYPE_CHECKING, Any

import pytest

from tests.native.architectures import fill

if TYPE_CHECKING:
    from comfy.sd import CLIP

_CLIP = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 5}
_LLAMA = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
_T5 = {"d_ff": 64, "d_kv": 8, "d_model": 32, "num_heads": 4, "num_layers": 3}
_NARROW = {
    "CLIPTextModel": _CLIP,
    "T5": _T5,
    "Qwen25_7BVLI": {**_LLAMA, "num_hidden_layers": 5},
    # As deep as the shortened files of Flux.2 are: its features are those after 10, 20 and 30 layers.
    "Mistral3Small24B": {**_LLAMA, "num_hidden_layers": 30, "vocab_size": 512},
}


@dataclasses.dataclass(frozen=True, eq=False)
class SmallText:
    name: str
    """Of the models that use it."""
    model: str
    """Its class, or what makes it with the arguments."""
    tokenizer: str
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    sizes: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    """Where they are not those of everybody."""
    has_weights: bool = True
    """Whether (words:1.3) mean anything to it."""

    def build(self, seed: int = 0) -> CLIP:
        import comfy.sd

        make = _named(self.model)
        clip = make(**self.arguments) if isinstance(make, types.FunctionType) else make
        target = types.SimpleNamespace(clip=clip, tokenizer=_named(self.tokenizer), params={})
        with pytest.MonkeyPatch.context() as patch:
            _narrow(patch, {**_NARROW, **self.sizes})
            patch.setattr("comfy.text_encoders.flux.MistralTokenizerClass", Letters)
            patch.setattr("comfy.text_encoders.flux.load_mistral_tokenizer", lambda data: {})
            built = comfy.sd.CLIP(target, tokenizer_data={"spiece_model": _sentence_pieces()})
        fill(built.cond_stage_model, seed)
        return built


def _named(path: str) -> Any:
    home, _, name = path.rpartition(".")
    return getattr(importlib.import_module(home), name)


def _narrow(patch: pytest.MonkeyPatch, sizes: dict[str, dict[str, int]]) -> None:
    """Text models that are made from here on have these sizes, whatever their files say."""
    from comfy.sd1_clip import SDClipModel
    from comfy.text_encoders import qwen_vl

    init, vision = SDClipModel.__init__, qwen_vl.Qwen2VLVisionTransformer

    def narrow_init(self, *args, **kwargs):
        # The class is also the default of an argument, so that it cannot be replaced where it is defined.
        model_class = kwargs.get("model_class", importlib.import_module("comfy.clip_model").CLIPTextModel)

        def narrow(config, *rest):
            return model_class({**config, **sizes[model_class.__name__]}, *rest)

        init(self, *args, **{**kwargs, "model_class": narrow})

    patch.setattr(SDClipModel, "__init__", narrow_init)
    narrow_vision = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "num_layers": 2}
    patch.setattr(qwen_vl, "Qwen2VLVisionTransformer", lambda **given: vision(**{**given, **narrow_vision}))


@functools.cache
def _sentence_pieces() -> bytes:
    """A tokenizer as Wan's files carry it."""
    import sentencepiece

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a red circle moving right on a black background", "two blue squares at night"] * 20),
        model_writer=written,
        vocab_size=60,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    return written.getvalue()


class Letters:
    """In place of the tokenizer that Flux.2's files carry, which this ComfyUI reads with an older transformers."""

    @classmethod
    def from_pretrained(cls, path: str) -> Letters:
        return cls()

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [1, *(100 + byte for byte in text.encode())]}

    def get_vocab(self) -> dict[str, int]:
        return {chr(byte): 100 + byte for byte in range(256)}


TEXTS = (
    SmallText("SD 1.5", "comfy.sd1_clip.SD1ClipModel", "comfy.sd1_clip.SD1Tokenizer"),
    SmallText("SDXL", "comfy.sdxl_clip.SDXLClipModel", "comfy.sdxl_clip.SDXLTokenizer"),
    SmallText(
        "SD3.5",
        "comfy.text_encoders.sd3_clip.sd3_clip",
        "comfy.text_encoders.sd3_clip.SD3Tokenizer",
        sizes={"T5": {**_T5, "d_model": 4096}},  # the CLIPs' features are filled up to this, and joined with its
    ),
    SmallText("Flux.1", "comfy.text_encoders.flux.flux_clip", "comfy.text_encoders.flux.FluxTokenizer"),
    SmallText(
        "Flux.2",
        "comfy.text_encoders.flux.flux2_te",
        "comfy.text_encoders.flux.Flux2Tokenizer",
        {"pruned": True},
        has_weights=False,
    ),
    SmallText("Wan 2.1, Wan 2.2", "comfy.text_encoders.wan.te", "comfy.text_encoders.wan.WanT5Tokenizer"),
    SmallText(
        "Qwen-Image",
        "comfy.text_encoders.qwen_image.te",
        "comfy.text_encoders.qwen_image.QwenImageTokenizer",
        has_weights=False,
    ),
    SmallText(
        "HunyuanVideo-1.5",
        "comfy.text_encoders.hunyuan_image.te",
        "comfy.text_encoders.hunyuan_video.HunyuanVideo15Tokenizer",
        has_weights=False,
    ),
)
