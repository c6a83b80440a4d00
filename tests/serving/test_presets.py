"""The field `preset` of an order: accepted, refused, and shown with the settings that follow from it."""

from pathlib import Path

import pytest

from tests.serving.stand_in import running
from tests.serving.test_api import create


def test_a_preset_is_passed_on_and_its_settings_are_shown(tmp_path: Path) -> None:
    with running(tmp_path) as (client, service, _):
        made = create(client, preset="4step", seed=7)
        shown = {
            name: made["settings"][name] for name in ("num_inference_steps", "guidance_scale", "scheduler", "seed")
        }
        assert shown == {"num_inference_steps": 4, "guidance_scale": 1.0, "scheduler": "euler-trailing", "seed": 7}
        record = service.ledger.find(made["id"])
        assert record is not None
        assert record.request.values["preset"] == "4step"
        assert "num_inference_steps" not in record.request.values, "the worker's pipeline says it, with the LoRA"
        chosen = create(client, preset="4step", steps=6)
        assert chosen["settings"]["num_inference_steps"] == 6
        (model,) = client.get("/v1/models").json()["data"]
        assert model["presets"]["4step"]["flow_shift"] == 3.0


def test_its_shift_goes_before_that_of_a_size(tmp_path: Path) -> None:
    with running(tmp_path) as (client, _, _):

        def shift(**chosen: object) -> float:
            made = create(client, size="720P", **chosen)["settings"]
            assert (made["width"], made["height"]) == (1280, 720)
            return float(made["flow_shift"])

        assert shift() == 5.0
        assert shift(preset="4step") == 3.0
        assert shift(preset="4step", flow_shift=2) == 2.0


@pytest.mark.parametrize("preset", ["9step", 4, ["4step"], {"name": "4step"}, "x" * 1000])
def test_another_preset_is_refused(tmp_path: Path, preset: object) -> None:
    with running(tmp_path) as (client, _, _):
        answer = client.post("/v1/videos", json={"prompt": "a cat", "preset": preset})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "preset"
        assert "choose from 4step, or auto" in error["message"]


def test_auto_is_decided_by_the_names_of_loras(tmp_path: Path) -> None:
    loras = tmp_path / "loras"
    loras.mkdir()
    (loras / "lightx2v_4step.safetensors").write_bytes(b"")
    with running(tmp_path / "served", lora_directory=loras) as (client, _, _):
        silent = create(client, preset="auto")
        assert silent["settings"]["num_inference_steps"] == 20
        # The demo model's own presets have no patterns: its LoRA says it in its metadata, which the worker reads.
        assert create(client, preset="auto", lora="lightx2v_4step")["settings"]["num_inference_steps"] == 20
