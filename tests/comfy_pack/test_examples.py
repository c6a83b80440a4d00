"""The example workflows, against the nodes that they use: ours as recorded, ComfyUI's from a table."""

import itertools
import json
import re

import pytest
from PIL import Image

from tests.comfy_pack.loading import ROOT
from tests.comfy_pack.stock_nodes import NOTES, STOCK, VHS_ADDED, WIDGETS
from tools.pages.download_size import workflow_sizes

DIRECTORY = ROOT / "example_workflows"
NAMES = [
    "flux2_tpu_basic",
    "flux_tpu_basic",
    "flux_tpu_image_to_image",
    "hunyuanvideo15_tpu_basic",
    "hunyuanvideo15_tpu_image_to_video",
    "ltx2_tpu_basic",
    "ltx2_tpu_image_to_video",
    "ltxv_tpu_basic",
    "ltxv_tpu_image_to_video",
    "qwen_image_tpu_basic",
    "qwen_image_tpu_edit",
    "wan21_native_tpu_model",
    "wan21_native_tpu_vae",
    "wan21_tpu_basic",
    "wan21_tpu_demo",
    "wan21_tpu_full_pipeline",
    "wan21_tpu_image_to_video",
    "wan21_tpu_native_vae",
    "wan21_tpu_server",
    "wan21_tpu_video_to_video",
    "wan21_tpu_videohelpersuite",
    "wan22_tpu_basic",
    "wan22_tpu_image_to_video",
    "wan22_tpu_second_pass",
    "wan_animate_tpu_basic",
    "wan_vace_tpu_basic",
    "z_image_tpu_basic",
    "z_image_tpu_image_to_image",
]
OURS = ("Wan21", "Wan22", "Flux", "HunyuanVideo15", "LTXVideo", "LTX2", "ZImage", "QwenImage", "WanVACE", "WanAnimate")
"""What the types of nodes with a model of their own begin with."""
TITLE_HEIGHT = 30
WIDTH_MAX = 1600
"""Of a layout: a screen of 1920 pixels without the side bar and its margins."""


def read(name):
    return json.loads((DIRECTORY / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture(params=NAMES)
def workflow(request):
    return read(request.param)


@pytest.fixture
def schemas(nodes):
    return {**STOCK, **nodes}


def working(workflow):
    return [node for node in workflow["nodes"] if node["type"] not in NOTES]


def widgets(schema):
    return [each for each in schema["inputs"] if each["type"] in WIDGETS]


def values(node, schema):
    """By input: the frontend writes widgets in their order, and what happens to a seed after a run behind the seed."""
    if isinstance(node["widgets_values"], dict):
        return node["widgets_values"]
    names = []
    for each in widgets(schema):
        names.append(each["id"])
        if each.get("control_after_generate"):
            names.append(f"{each['id']} afterwards")
    return dict(zip(names, node["widgets_values"], strict=True))


def problem(value, schema):
    kind = schema["type"]
    if kind in ("INT", "FLOAT"):
        if isinstance(value, bool) or not isinstance(value, int if kind == "INT" else (int, float)):
            return "is no number of that kind"
        low, step = schema.get("min", 0), schema.get("step", 1)
        if not low <= value <= schema.get("max", value):
            return "is out of range"
        return "is between two steps" if kind == "INT" and (value - low) % step else None
    if kind == "BOOLEAN":
        return None if isinstance(value, bool) else "is not true or false"
    if not isinstance(value, str):
        return "is no text"
    if kind == "COMBO" and value not in schema.get("options", [value]):
        return "is not on the list"
    return None


def test_these_examples_and_no_others():
    assert sorted(path.stem for path in DIRECTORY.glob("*.json")) == NAMES


def test_form(workflow):
    """Version 0.4, as the frontend saves it."""
    assert workflow["version"] == 0.4
    expected = {
        "id",
        "revision",
        "last_node_id",
        "last_link_id",
        "nodes",
        "links",
        "groups",
        "config",
        "extra",
        "version",
    }
    assert set(workflow) == expected
    for node in workflow["nodes"]:
        assert {"id", "type", "pos", "size", "flags", "order", "mode", "inputs", "outputs", "properties"} <= set(node)
        assert node["mode"] == 0
    ids = [node["id"] for node in workflow["nodes"]]
    assert len(ids) == len(set(ids))
    assert max(ids) <= workflow["last_node_id"]
    assert max(link[0] for link in workflow["links"]) <= workflow["last_link_id"]


def test_sockets_are_those_of_the_nodes(workflow, schemas):
    for node in working(workflow):
        schema = schemas[node["type"]]
        # The frontend lists what can only be linked first, then a socket for every widget.
        declared = [each for each in schema["inputs"] if each["type"] not in WIDGETS] + widgets(schema)
        assert [(each["name"], each["type"]) for each in node["inputs"]] == [
            (each["id"], each["type"]) for each in declared
        ]
        for socket, each in zip(node["inputs"], declared, strict=True):
            assert socket.get("widget") == ({"name": each["id"]} if each["type"] in WIDGETS else None)
            assert socket.get("shape") == (7 if each["optional"] else None), each["id"]
        assert [(each["name"], each["type"]) for each in node["outputs"]] == [
            (each["name"], each["type"]) for each in schema["outputs"]
        ]


def test_values_are_allowed(workflow, schemas):
    for node in working(workflow):
        schema = schemas[node["type"]]
        given = values(node, schema)
        for each in widgets(schema):
            value = given[each["id"]]
            assert problem(value, each) is None, f"{node['type']}.{each['id']}={value!r} {problem(value, each)}"
        known = {each["id"] for each in widgets(schema)} | {f"{each['id']} afterwards" for each in widgets(schema)}
        added = VHS_ADDED if node["type"] == "VHS_VideoCombine" else set()
        assert set(given) - known == added
        for name, value in given.items():
            if name.endswith(" afterwards"):
                assert value == "fixed"


def test_links_join_what_fits(workflow):
    nodes = {node["id"]: node for node in workflow["nodes"]}
    assert len({link[0] for link in workflow["links"]}) == len(workflow["links"])
    for number, source, slot, destination, place, kind in workflow["links"]:
        output, entry = nodes[source]["outputs"][slot], nodes[destination]["inputs"][place]
        assert number in output["links"]
        assert entry["link"] == number
        assert output["type"] == kind
        assert entry["type"] in (kind, "*"), f"{nodes[source]['type']} -> {nodes[destination]['type']}"
        assert nodes[source]["order"] < nodes[destination]["order"]
    named = [entry["link"] for node in nodes.values() for entry in node["inputs"] if entry["link"] is not None]
    named_by_outputs = [number for node in nodes.values() for each in node["outputs"] for number in each["links"] or []]
    assert sorted(named) == sorted(named_by_outputs) == sorted(link[0] for link in workflow["links"])


def test_nothing_that_is_needed_is_left_open(workflow, schemas):
    for node in working(workflow):
        optional = {each["id"]: each["optional"] for each in schemas[node["type"]]["inputs"]}
        for socket in node["inputs"]:
            assert socket["link"] is not None or "widget" in socket or optional[socket["name"]], socket["name"]
    assert any(schemas[node["type"]]["is_output_node"] for node in working(workflow))


def test_one_model_throughout(workflow, schemas):
    chosen = {values(node, schemas[node["type"]]).get("model_id") for node in working(workflow)} - {None}
    chooses = any(node["type"].startswith(OURS) for node in working(workflow))
    assert len(chosen) == int(chooses)


def test_layout_can_be_read(workflow):
    """No node lies on another, every node that works lies in a group, and a note explains the whole."""

    def box(node):
        (left, top), (width, height) = node["pos"], node["size"]
        return left, top - TITLE_HEIGHT, left + width, top + height

    for one, other in itertools.combinations(workflow["nodes"], 2):
        (left, top, right, bottom), (left2, top2, right2, bottom2) = box(one), box(other)
        apart = right <= left2 or right2 <= left or bottom <= top2 or bottom2 <= top
        assert apart, f"{one['type']} lies on {other['type']}"
    for group, node in itertools.product(workflow["groups"], workflow["nodes"]):
        x, y, width, height = group["bounding"]
        left, top, right, bottom = box(node)
        inside = x <= left and y <= top and right <= x + width and bottom <= y + height
        outside = right <= x or x + width <= left or bottom <= y or y + height <= top
        assert inside or outside, f"{node['type']} lies across the edge of {group['title']}"
    edges = [(box(node)[0], box(node)[2]) for node in workflow["nodes"]]
    edges += [(group["bounding"][0], group["bounding"][0] + group["bounding"][2]) for group in workflow["groups"]]
    assert max(right for _, right in edges) - min(left for left, _ in edges) <= WIDTH_MAX


def test_the_note_is_in_both_languages_and_has_the_size_of_the_download(workflow):
    (note,) = [node for node in workflow["nodes"] if node["type"] in NOTES]
    english, chinese = note["widgets_values"][0].split("\n\n**中文**\n\n")
    assert len(english) > 200
    assert len(re.findall(r"[\u4e00-\u9fff]", chinese)) > 35
    sizes = workflow_sizes(workflow)
    for text, word in ((english, "**Download**: "), (chinese, "**下载**：")):
        (line,) = [line for line in text.splitlines() if line.startswith(word)]
        assert sorted(re.findall(r"\d[\d.]* GB", line)) == sorted(sizes)
        assert sizes or re.search("none|无", line)


def test_the_titles_of_groups_are_in_both_languages_and_fit(workflow):
    """ComfyUI translates the names of nodes, and nothing that a workflow says itself."""
    for group in workflow["groups"]:
        title = group["title"]
        assert title.endswith("VideoHelperSuite") or re.search(r"^\d · [A-Z].* · .*[\u4e00-\u9fff]", title), title
        pixels = sum(24 if ord(letter) > 0x2E80 else 12 for letter in title)
        assert pixels <= group["bounding"][2] - 10, title


def test_missing_packs_and_models_can_be_found(workflow):
    """By what ComfyUI's manager and its dialog for missing models read."""
    for node in working(workflow):
        ours = node["type"].startswith((*OURS, "TPU"))
        expected = "comfy-tpu" if ours else "comfyui-videohelpersuite" if "VHS" in node["type"] else "comfy-core"
        assert node["properties"]["cnr_id"] == expected
        files = [value for value in node["widgets_values"] if str(value).endswith(".safetensors")]
        assert [model["name"] for model in node["properties"].get("models", [])] == files


def settings(name, node_type, schemas):
    (node,) = [node for node in working(read(name)) if node["type"] == node_type]
    return values(node, schemas[node_type])


def test_the_demo_runs_without_a_download(schemas):
    sampler = settings("wan21_tpu_demo", "Wan21TPUSampler", schemas)
    assert {name: sampler[name] for name in ("num_frames", "num_inference_steps", "guidance_scale", "flow_shift")} == {
        "num_frames": 17,
        "num_inference_steps": 20,
        "guidance_scale": 3.0,
        "flow_shift": 3.0,
    }
    assert sampler["model_id"] == "demo"
    assert settings("wan21_tpu_demo", "Wan21TPUVAEDecoder", schemas)["fps"] == 8
    encoder = settings("wan21_tpu_demo", "Wan21TextEncoder", schemas)
    assert encoder["prompt"] == "a red circle moving right on a black background"
    types = {node["type"] for node in working(read("wan21_tpu_demo"))}
    assert types == {"Wan21TextEncoder", "Wan21TPUSampler", "Wan21TPUVAEDecoder", "SaveVideo", "TPUInfo"}


@pytest.mark.parametrize(
    ("name", "node_type"),
    [
        ("wan21_tpu_basic", "Wan21TPUSampler"),
        ("wan21_tpu_full_pipeline", "Wan21TPUPipeline"),
        ("wan22_tpu_basic", "Wan22TPUSampler"),
        ("flux_tpu_basic", "FluxTPUSampler"),
        ("flux2_tpu_basic", "Flux2TPUSampler"),
        ("hunyuanvideo15_tpu_basic", "HunyuanVideo15TPUSampler"),
        ("z_image_tpu_basic", "ZImageTPUSampler"),
        ("qwen_image_tpu_basic", "QwenImageTPUSampler"),
        ("qwen_image_tpu_edit", "QwenImageEditTPUSampler"),
    ],
)
def test_the_plain_examples_have_the_nodes_defaults(name, node_type, schemas):
    given = settings(name, node_type, schemas)
    for each in widgets(schemas[node_type]):
        if not each["id"].endswith("prompt"):
            assert given[each["id"]] == each["default"], each["id"]


@pytest.mark.parametrize(
    ("name", "node_type"), [("wan21_tpu_basic", "CreateVideo"), ("wan21_tpu_videohelpersuite", "VHS_VideoCombine")]
)
def test_the_speed_is_set_in_one_place(name, node_type):
    """The decoder's fps goes on to whoever makes the video."""
    (node,) = [node for node in working(read(name)) if node["type"] == node_type]
    (speed,) = [each for each in node["inputs"] if each["name"] in ("fps", "frame_rate")]
    assert speed["link"] is not None


@pytest.mark.parametrize("name", NAMES)
def test_thumbnail(name):
    """The frontend asks for NAME.jpg, and for nothing else."""
    path = DIRECTORY / f"{name}.jpg"
    assert path.stat().st_size <= 60_000
    with Image.open(path) as image:
        assert image.format == "JPEG"
        assert 1.6 <= image.width / image.height <= 1.9
        assert image.width >= 480


def test_no_other_files():
    assert {path.suffix for path in DIRECTORY.iterdir()} == {".json", ".jpg"}
    assert len(list(DIRECTORY.iterdir())) == 2 * len(NAMES)
