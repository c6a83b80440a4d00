"""What nodes hand out is plain host data, whatever a pipeline gives them. Needs no ComfyUI."""

import pytest

from tests.comfy_pack.loading import run_script

ON_META = "is a tensor on meta, expected one on cpu; use to_host()"


@pytest.fixture(scope="module")
def outcomes():
    return run_script("run_nodes.py")


def test_host_data_is_handed_out(outcomes):
    assert set(outcomes["host"].values()) == {"handed out"}


def test_every_node_refuses_to_hand_out_a_tensor_of_another_device(outcomes):
    assert outcomes["meta"] == {
        "Wan21TextEncoder": f"output 0[0][0] {ON_META}",
        "Wan21ImageEncoder": f"output 0['condition'] {ON_META}",
        "Wan21VideoEncoder": f"output 0['condition'] {ON_META}",
        "Wan21TPUSampler": f"output 0['samples'] {ON_META}",
        "Wan21TPUVAEDecoder": f"output 0 {ON_META}",
        "Wan21TPUPipeline": f"output 0 {ON_META}",
    }


def test_a_jax_array_is_refused(outcomes):
    for node in ("Wan21ImageEncoder", "Wan21VideoEncoder"):
        refused = outcomes["jax"][node]
        assert refused.startswith("output 0['condition'] is a jaxlib.")
        assert refused.endswith("expected host data; use to_host()")
