"""Help texts name every family's sizes and frame counts, as its card has them."""

import dataclasses

import pytest

from comfy_tpu.cli import card_texts, main
from comfy_tpu.families import registry


def read_help(capsys, *command):
    with pytest.raises(SystemExit):
        main.main([*command, "--help"])
    return " ".join(capsys.readouterr().out.replace("-\n", "-").split()).replace("- ", "-")


@pytest.fixture
def with_painter(monkeypatch):
    """One more family: 16n+1 frames, a size of its own, and a name that argparse would take for a format."""
    (ltx,) = (card for card in registry.family_cards() if card.name == "ltx_video")
    (nodes,) = ltx.node_sets
    (model,) = nodes.models
    limits = dataclasses.replace(model.limits, frames_multiple=16)
    model = dataclasses.replace(model, name="Painter", limits=limits, sizes={"99P": {}, "100P": {}})
    painter = dataclasses.replace(
        ltx,
        package="elsewhere.painter",
        title="100% Painter",
        node_sets=(dataclasses.replace(nodes, models=(model,)),),
    )
    cards = (*registry.family_cards(), painter)
    monkeypatch.setattr(card_texts, "family_cards", lambda: cards)


def test_every_family_is_in_the_help(capsys):
    text = read_help(capsys, "generate")
    for card in registry.family_cards():
        assert card.title in text
    for size in (name for model in registry.model_cards() for name in model.sizes):
        assert size in text
    assert f"those of {registry.model_cards()[0].name} are shown" in text


def test_a_new_family_is_in_the_help(capsys, with_painter):
    text = read_help(capsys, "generate")
    assert "16n+1 for 100% Painter" in text
    assert "99P, 100P for 100% Painter" in text


def test_texts(monkeypatch):
    known = ("wan", "flux", "flux2", "hunyuan_video", "ltx_video")
    cards = [card for card in registry.family_cards() if card.name in known]
    monkeypatch.setattr(card_texts, "family_cards", lambda: cards)
    assert card_texts.frame_counts() == "4n+1 or any for Wan; 4n+1 for HunyuanVideo-1.5; 8n+1 for LTX-Video"
    assert card_texts.size_names() == (
        "480P, 720P for Wan, HunyuanVideo-1.5; 512, 768, 1024 for Flux.1, Flux.2; 480P, 512P for LTX-Video"
    )


@pytest.mark.parametrize("command", ["generate", "warm", "plan"])
def test_presets_and_sizes_are_not_mixed_up(capsys, command):
    text = read_help(capsys, command)
    sizes = text.partition("--size SIZE " if command == "plan" else "--size NAME ")[2].partition(" --")[0]
    presets = text.partition("--preset NAME ")[2].partition(" --")[0]
    assert "480P" in sizes
    assert "4step, 8step for Wan" in presets
    assert "720P" not in presets
    assert "step" not in sizes
