"""What the measurements of lossy variants leave behind."""

import dataclasses
import datetime
import json

from comfy_tpu.config import FAST
from tools.demo_model.savings import VARIANTS, Runner, describe_run, make_table


def test_a_report_says_on_what_and_when_it_was_measured():
    document = json.loads(json.dumps(describe_run({"steps": 50})))
    assert document["schema"] == 1
    assert document["settings"] == {"steps": 50}
    assert document["hardware"]["platform"] == "cpu"
    assert document["hardware"]["processor_cores"] >= 1
    assert {"torch", "jax", "comfy-tpu"} <= document["versions"].keys()
    assert datetime.datetime.fromisoformat(document["date"]).tzinfo is not None


def test_variants_combine_every_way_to_save_time():
    names = [variant.name for variant in VARIANTS]
    assert len(set(names)) == len(names)
    runner = Runner("demo", list(VARIANTS), steps=50, mesh="single")
    accounts = {variant.name: runner.account(variant) for variant in VARIANTS}
    assert accounts["lossless"].forwards == accounts["fp8"].forwards == 100
    assert accounts["lossless"].settings == {"reuse": 0.0, "guidance_until": 1.0, "quantize": "none"}
    assert accounts["reuse 0.12"].forwards == 50
    assert accounts["reuse 0.12, guidance until 0.5, fp8"].forwards == 40
    assert accounts["reuse 0.12, guidance until 0.5, fp8"].settings["quantize"] == "fp8"
    assert accounts["fast"].settings == {**dataclasses.asdict(FAST), "quantize": "none"}, "a CPU is faster without it"
    by_hand = f"reuse {FAST.reuse}, guidance until {FAST.guidance_until}"
    assert accounts["fast"].forwards == accounts[by_hand].forwards < 50


def test_the_table_is_sorted_by_speed():
    row = {"forwards": 10, "median_s": 1.0, "share": {"colour": 1.0, "shape": 0.5}, "latent_difference": 0.125}
    lines = make_table({"fast": {**row, "times_faster": 2.5}, "lossless": {**row, "times_faster": 1.0}})
    assert lines[2:] == [
        "| lossless | 10 | 1.00 s | 1.00× | 100 | 0 | 50 | 12.5 % |",
        "| fast | 10 | 1.00 s | 2.50× | 100 | 0 | 50 | 12.5 % |",
    ]
