"""The grammar: what is held out stays out, and captions say what they mean."""

import random

import pytest

from tools.demo_model.captions import (
    BACKGROUNDS,
    COLOURS,
    HELD_OUT_TRIPLES,
    MOTIONS,
    SHAPES,
    TRAINING_TRIPLES,
    TRIPLES,
    Attributes,
    paraphrase,
    parse,
    plain_caption,
    vocabulary,
)
from tools.demo_model.clips import evaluation_prompts
from tools.demo_model.train_video import TOKENS


def test_size_of_the_grammar():
    assert len(COLOURS) >= 8
    assert len(SHAPES) >= 4
    assert len(BACKGROUNDS) >= 4
    assert set(MOTIONS) == {"left", "right", "up", "down", "still", "growing", "shrinking", "spinning"}
    assert len(HELD_OUT_TRIPLES) == 32
    assert sorted(TRAINING_TRIPLES + HELD_OUT_TRIPLES) == sorted(TRIPLES)


def test_every_pair_of_attributes_is_seen_in_training():
    for first, second in ((0, 1), (0, 2), (1, 2)):
        pairs = {(triple[first], triple[second]) for triple in TRIPLES}
        assert {(triple[first], triple[second]) for triple in TRAINING_TRIPLES} == pairs


def test_the_plain_caption():
    attributes = Attributes("red", "circle", "left", "black")
    assert plain_caption(attributes) == "a red circle moving left on a black background"
    assert plain_caption(Attributes("orange", "star", "still", None)) == "an orange star standing still"


def test_captions_parse_back_and_vary():
    rng = random.Random(7)
    known = set(vocabulary())
    for triple in TRIPLES:
        attributes = Attributes(*triple, rng.choice([None, *BACKGROUNDS]))
        captions = {paraphrase(attributes, rng) for _ in range(12)}
        assert len(captions) > 6
        for caption in [*captions, plain_caption(attributes)]:
            assert parse(caption) == attributes, caption
            words = caption.lower().replace(",", " ,").replace(".", " .").split()
            assert set(words) <= known, caption
            assert len(words) < TOKENS - 2, caption  # the end mark and an unknown word must fit too


@pytest.mark.parametrize("caption", ["a red circle", "a circle moving left", "a red blue circle moving left"])
def test_a_caption_that_says_too_little_or_too_much_is_refused(caption):
    with pytest.raises(ValueError, match=r"names .* (motion|colour); expected exactly one"):
        parse(caption)


def test_evaluation_prompts_are_fixed_by_their_seed():
    prompts = evaluation_prompts(100, 25, seed=3)
    assert prompts == evaluation_prompts(100, 25, seed=3)
    assert prompts != evaluation_prompts(100, 25, seed=4)
    triples = [attributes.triple for _, attributes in prompts]
    assert len(set(triples)) == 100
    assert [triple in HELD_OUT_TRIPLES for triple in triples] == [False] * 75 + [True] * 25
    assert all(parse(text) == attributes for text, attributes in prompts)
