"""A tokenizer that is a tokenizer.json and nothing else, against transformers' own reading of it."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from comfy_tpu.errors import CheckpointError
from comfy_tpu.pipeline.model_files import DEMO_DIRECTORY, ModelFiles
from comfy_tpu.pipeline.plain_tokenizer import PlainTokenizer
from comfy_tpu.pipeline.text import Tokens, tokenize

TOKENIZER = DEMO_DIRECTORY / "tokenizer"
PROMPTS = ("a red circle moving left", "", "unknown wörter, 你好 and a red star", "circle " * 700, " \t A  RED ")


@pytest.mark.parametrize("length", [8, 32])
def test_rows_are_those_of_transformers(length: int) -> None:
    plain, full = PlainTokenizer.open(TOKENIZER), ModelFiles.open("demo").tokenizer("tokenizer")
    assert plain is not None
    expected = full(
        list(PROMPTS), padding="max_length", max_length=length, truncation=True, return_tensors="pt", verbose=False
    )
    found = plain.encode_rows(PROMPTS, length)
    assert torch.equal(found["input_ids"], expected.input_ids.int())
    assert torch.equal(found["attention_mask"], expected.attention_mask.int())
    assert plain.num_special_tokens_to_add() == full.num_special_tokens_to_add()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_offsets_are_those_of_transformers(prompt: str) -> None:
    plain, full = PlainTokenizer.open(TOKENIZER), ModelFiles.open("demo").tokenizer("tokenizer")
    assert plain is not None
    plain.encode_rows([prompt], 8)  # must leave no truncation behind
    expected = full(prompt, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    found = plain(prompt)
    assert found["input_ids"] == expected["input_ids"]
    assert [tuple(each) for each in found["offset_mapping"]] == [tuple(each) for each in expected["offset_mapping"]]


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer_class": "T5TokenizerFast"},
        {"pad_token": None},
        {"pad_token": "<nothing>"},
        {"model_max_length": []},
        {"padding_side": "left"},
        {"chat_template": "{{ x }}"},
    ],
)
def test_others_stay_with_transformers(change: dict, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    shutil.copytree(TOKENIZER, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert PlainTokenizer.open(folder) is None


@pytest.mark.parametrize("file", ["special_tokens_map.json", "added_tokens.json"])
def test_files_beside_it_stay_with_transformers(file: str, tmp_path: Path) -> None:
    shutil.copytree(TOKENIZER, tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / file).write_text("{}")
    assert PlainTokenizer.open(tmp_path / "tokenizer") is None


@pytest.mark.parametrize("content", ["", "{}", '{"model": 5}'])
def test_a_damaged_file_is_named(content: str, tmp_path: Path) -> None:
    shutil.copytree(DEMO_DIRECTORY, tmp_path / "model")
    (tmp_path / "model" / "tokenizer" / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match="has a tokenizer that cannot be read"):
        ModelFiles.open(tmp_path / "model").tokenizer("tokenizer", may_be_plain=True)


def test_threads_do_not_disturb_each_other() -> None:
    """The tokenizers library keeps padding and the limit of a call until the next call, of any thread."""
    files = ModelFiles.open("demo")
    (encoder,) = files.family.text.encoders

    def run(length: int) -> Tokens:
        return tokenize(files, encoder, PROMPTS, length)

    lengths = [8, 32] * 80
    alone = {length: run(length) for length in set(lengths)}
    with ThreadPoolExecutor(4) as threads:
        for length, found in zip(lengths, threads.map(run, lengths), strict=True):
            assert torch.equal(found.inputs["input_ids"], alone[length].inputs["input_ids"])
            assert found.cut == alone[length].cut
