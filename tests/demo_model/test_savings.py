"""What the measurements of lossy variants leave behind."""

import datetime
import json

from tools.demo_model.savings import describe_run


def test_a_report_says_on_what_and_when_it_was_measured():
    document = json.loads(json.dumps(describe_run({"steps": 50})))
    assert document["schema"] == 1
    assert document["settings"] == {"steps": 50}
    assert document["hardware"]["platform"] == "cpu"
    assert document["hardware"]["processor_cores"] >= 1
    assert {"torch", "jax", "comfy-tpu"} <= document["versions"].keys()
    assert datetime.datetime.fromisoformat(document["date"]).tzinfo is not None
