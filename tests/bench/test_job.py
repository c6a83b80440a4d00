import json

import pytest

from comfy_tpu.bench.job import DEVICES, FULL, MODELS, PARTS, SMALL, Choices, Job, VideoSize
from comfy_tpu.bench.runner import jobs
from comfy_tpu.bench.vae_choices import INPUTS, START, TURNS
from comfy_tpu.bench.worker import PARTS as MEASURED
from comfy_tpu.errors import InvalidValueError


def test_tokens_of_the_usual_sizes():
    assert VideoSize.parse("832x480x81").tokens == 32_760
    assert VideoSize.parse("1280x720x81").tokens == 75_600
    assert [size.tokens for size in FULL.scaling_sizes] == [8_190, 15_876, 32_760, 48_384, 75_600]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("832x480", r"size=832x480 is not of the form WIDTHxHEIGHTxFRAMES; write for example 832x480x81"),
        ("480p", "size=480p is not of the form"),
        ("830x480x81", r"size=830x480x81: width and height must be multiples of 16, frames 4n\+1; try 832x480x81"),
        ("832x480x80", "size=832x480x80: width and height"),
        ("0x480x81", "size=0x480x81: width and height"),
    ],
)
def test_sizes_that_no_model_has(text, message):
    with pytest.raises(InvalidValueError, match=message):
        VideoSize.parse(text)


def test_every_part_can_be_measured():
    assert set(MEASURED) == {*PARTS, DEVICES, INPUTS, START, TURNS}


def test_a_job_survives_the_way_to_its_process():
    job = Job("vae", size="96x64x9", peers=("ours",), state="warm", started=1.5)
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job


def test_a_run_is_its_parts_at_every_size():
    made = jobs(Choices(parts=("transformer", "text", "compile", "scaling")), "full", "bfloat16")
    assert [(job.part, job.size, job.state) for job in made] == [
        ("transformer", "832x480x81", "cold"),
        ("transformer", "1280x720x81", "cold"),
        ("text", "832x480x81", "cold"),
        ("compile", "832x480x81", "cold"),
        ("compile", "832x480x81", "warm"),
        ("compile", "1280x720x81", "cold"),
        ("compile", "1280x720x81", "warm"),
        ("scaling", "832x480x81", "cold"),
        (DEVICES, "832x480x81", "cold"),
    ]
    assert made[0].peers == ("ours", "fp8", "eager", "compile")
    assert (made[-1].model, made[-1].dtype) == ("small", "float32"), "virtual devices have the host's memory"


def test_the_small_model_leaves_out_torch_compile_unless_it_is_asked_for():
    assert jobs(Choices(parts=("vae",)), "small", "float32")[0].peers == ("ours", "eager")
    assert jobs(Choices(parts=("vae",), peers=("compile",)), "small", "float32")[0].peers == ("compile",)


def test_the_command_that_repeats_a_run():
    choices = Choices(parts=("vae", "end-to-end"), sizes=(VideoSize(96, 64, 9),), peers=("ours",), steps=3)
    assert choices.command == "comfy-tpu bench --what vae,end-to-end --size 96x64x9 --peers ours --steps 3"


@pytest.mark.parametrize("field", ["repeats", "steps"])
@pytest.mark.parametrize("value", [0, -1, "many", 1.5])
def test_counts_are_whole_numbers_from_one(field, value):
    with pytest.raises(InvalidValueError, match=f"{field}={value!r} is not allowed; give a whole number from 1"):
        Choices(**{field: value})


def test_peers_that_no_part_has():
    with pytest.raises(
        InvalidValueError, match="peers=fp8: nothing would be measured in text, vae; choose from ours, eager, compile"
    ):
        Choices(parts=("text", "vae"), peers=("fp8",))
    made = jobs(Choices(parts=("transformer", "text", "scaling"), peers=("fp8",)), "small", "float32")
    assert [(job.part, job.entrants) for job in made] == [
        ("transformer", ("fp8",)),
        ("text", ()),
        ("scaling", ("fp8",)),
        (DEVICES, ()),
    ]


def test_the_small_model_is_the_full_one_in_small():
    assert MODELS == {"full": FULL, "small": SMALL}
    assert SMALL.transformer.keys() == FULL.transformer.keys()
    assert SMALL.text_encoder.keys() == FULL.text_encoder.keys()
    assert SMALL.transformer["text_dim"] == SMALL.text_encoder["d_model"]
    assert SMALL.transformer["num_attention_heads"] % max(SMALL.scaling_devices) == 0
