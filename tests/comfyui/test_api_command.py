"""comfy-tpu comfyui run, on a real server."""

import json
from pathlib import Path

import pytest
from PIL import Image

from comfy_tpu.cli.main import main
from tests.comfyui.graphs import SAMPLER, three_nodes
from tests.comfyui.server import ComfyServer

pytestmark = pytest.mark.comfyui


def run(server: ComfyServer, workflow: Path, output: Path) -> int:
    return main(["comfyui", "run", str(workflow), "--server", server.url, "--output", str(output), "--timeout", "600"])


def test_a_workflow_its_results_and_its_errors(
    server: ComfyServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workflow, output = tmp_path / "workflow.json", tmp_path / "results"
    workflow.write_text(json.dumps(three_nodes(seed=77)))
    assert run(server, workflow, output) == 0
    paths = capsys.readouterr().out.splitlines()
    assert len(paths) == 17
    for path in paths:
        assert Path(path).parent == output
        with Image.open(path) as image:
            assert image.size == (64, 64)
    # Refused by validation, then by the node itself.
    workflow.write_text(json.dumps(three_nodes(model="no such model")))
    assert run(server, workflow, output) == 1
    assert "ComfyUI refuses the workflow: node " in capsys.readouterr().err
    crossed = three_nodes(seed=78)
    crossed[SAMPLER]["inputs"]["model_id"] = "demo-image"
    workflow.write_text(json.dumps(crossed))
    assert run(server, workflow, output) == 1
    assert f"node {SAMPLER} (Wan21TPUSampler) failed: " in capsys.readouterr().err
    assert len(list(output.iterdir())) == 17
