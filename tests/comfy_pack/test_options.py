"""TPU Options reaches the pipelines of the nodes: meshes, numbers of videos, and one sentence for every bad value."""

import pytest

from tests.comfy_pack.loading import run_script


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return run_script("run_options.py", directory=tmp_path_factory.mktemp("base"))


def test_every_node_runs_on_the_mesh_of_the_options(ran):
    assert ran["meshes"][:4] == ["dp=2,sp=1,tp=4"] * 4
    assert ran["devices"] == 8


def test_other_options_are_another_pipeline_and_the_first_is_kept(ran):
    assert ran["meshes"][4:] == ["dp=1,sp=8,tp=1", "dp=2,sp=4,tp=1", "dp=2,sp=1,tp=4"]
    assert ran["dtypes"][4] == "bfloat16"
    assert ran["kept"]


def test_several_videos_are_a_batch_of_latents_and_follow_one_another_as_frames(ran):
    assert ran["latents"] == [2, 16, 5, 8, 8]
    assert ran["frames"] == [[34, 64, 64, 3]] * 2
    assert ran["firsts"] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("mesh", "mesh 'dp=2,xp=4': unknown axis 'xp'; choose axes from dp, sp, tp"),
        ("attention_window", "attention_window='4x16x16' is no window; write full, video,"),
        ("attention_blocks", "attention_blocks=100,100,100 is not a possible tile"),
        ("dense_max_tokens", "dense_max_tokens=0 is not a whole number from 1"),
        ("num_videos", "num_videos=1.5 is not a whole number"),
        ("context_frames", "context_frames=17.5 is not a whole number"),
    ],
)
def test_a_bad_value_is_refused_by_the_options_node_with_its_input(ran, name, sentence):
    field, message = ran["bad"][name]
    assert field == name
    assert message.startswith(sentence)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("reuse", "reuse=7.0 is not a number from 0 to 1"),
        ("mesh", "mesh dp=1,sp=1,tp=16 needs 16 devices but there are 8"),
        ("options", "options is a str, expected what TPU Options gives"),
        ("context_overlap", "context_overlap=90 leaves windows of 81 frames"),
    ],
)
def test_a_value_that_does_not_suit_the_model_is_refused_by_the_node_that_runs_it(ran, name, sentence):
    field, message = ran["bad at run"][name]
    assert field == name
    assert message.startswith(sentence)


def test_a_long_video_over_a_link_has_the_windows_of_the_options(ran):
    assert ran["context"] == [161, "uniform", 81, 8, "pyramid", 2]


def test_fast_decides_what_is_at_its_default(ran):
    assert ran["fast"] == {
        "off": [0.0, 1.0, None, False],
        "on": [None, None, None, True],
        "beside others": [0.05, 0.9, "int8", True],
    }


def test_a_preset_goes_before_the_widgets_which_always_say_something(ran):
    widgets, *few = ran["preset"]["settings"]
    assert few == [[4, 1.0, "euler-trailing", 3.0, widgets[-1]]] * 2
    assert widgets[:2] != few[0][:2]
    assert ran["preset"]["loras"] == [1, 1]
    field, message = ran["preset"]["unknown"]
    assert field == "preset"
    assert message == "preset=8step is unknown for model demo; choose from 4step, or auto"


def test_compile_nodes_refuse_what_only_families_have(ran):
    for name, (field, message) in ran["compile"].items():
        assert field == name
        assert f"{name}=" in message
        assert "in TPU Options is for the nodes of a model family" in message


def test_options_win_over_the_inputs_of_a_compile_node(ran):
    assert ran["choices"] == (
        "Choices(mesh='dp=2,tp=4', precision='float32', attention='splash', "
        "block_sizes=BlockSizes(query=256, key=256, key_compute=128), dense_max_tokens=4096, cpu_fallback=False)"
    )


def test_a_large_model_is_downloaded_only_where_the_options_allow_it(ran):
    field, message = ran["downloads"]["off"]
    assert (field, message.endswith(" is large")) == ("model_id", True)
    assert ran["downloads"]["on"] == [None, "it is downloaded"]
