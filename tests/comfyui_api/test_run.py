"""comfy-tpu comfyui run against a stand-in for the server; tests/comfyui/test_api_command.py has a real one."""

import json
from pathlib import Path

import pytest

from comfy_tpu.cli.main import main
from comfy_tpu.comfyui_api import run as running
from comfy_tpu.comfyui_api.client import Client
from comfy_tpu.comfyui_api.run import plain_name
from tests.comfyui_api.stand_in import ID, entry, serving

WORKFLOW = {"3": {"class_type": "KSampler", "inputs": {"seed": 1}}, "9": {"class_type": "SaveImage", "inputs": {}}}


@pytest.fixture(scope="module")
def shared_server():
    with serving() as server:
        yield server


@pytest.fixture
def server(shared_server, monkeypatch, tmp_path):
    """The stand-in as it is new, in an empty current directory with a workflow."""
    monkeypatch.setattr(running, "POLL_SECONDS", 0)
    monkeypatch.chdir(tmp_path)
    Path("workflow.json").write_text(json.dumps(WORKFLOW))
    url, close = shared_server.url, shared_server.close
    shared_server.__init__()
    shared_server.url, shared_server.close = url, close
    return shared_server


def run(server, capsys, *arguments, workflow="workflow.json"):
    status = main(["comfyui", "run", workflow, "--server", server.url, *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def image(name, subfolder="", kind="output"):
    return {"filename": name, "subfolder": subfolder, "type": kind}


def test_a_run_from_the_queue_to_its_files(server, capsys):
    server.states = [
        2,
        2,
        1,
        0,
        entry({"9": {"images": [image("a.png"), image("b.mp4", "video")], "animated": [True]}}),
    ]
    server.activity = {"stage": "denoising", "what": "64×64×17", "done": 3, "total": 50}
    server.files = {("output", "", "a.png"): b"A" * 10, ("output", "video", "b.mp4"): b"B" * 3_000_000}
    status, out, err = run(server, capsys, "--output", "results")
    assert (status, out) == (0, "results/a.png\nresults/b.mp4\n")
    assert err.splitlines() == [
        "comfy-tpu: waiting, 2 before it",
        "comfy-tpu: waiting, 1 before it",
        "comfy-tpu: denoising 64×64×17 3/50",
    ]
    assert Path("results/a.png").read_bytes() == b"A" * 10
    assert Path("results/b.mp4").read_bytes() == b"B" * 3_000_000
    assert sorted(path.name for path in Path("results").iterdir()) == ["a.png", "b.mp4"]
    sent = dict(server.asked)["/prompt"]
    assert sent["prompt"] == WORKFLOW
    assert sent["client_id"]


def test_without_a_directory_the_files_are_named(server, capsys):
    outputs = {"9": {"images": [image("a.png", "x"), image("p.png", kind="temp")]}, "4": {"text": ["8 tpu devices"]}}
    server.states = [0, entry(outputs)]
    assert run(server, capsys)[:2] == (0, "output/x/a.png\ntemp/p.png\n")
    server.states = [0, entry(outputs)]
    document = json.loads(run(server, capsys, "--json")[1])
    assert set(document) == {"schema", "server", "prompt_id", "seconds", "outputs", "results", "texts"}
    assert (document["prompt_id"], document["outputs"]) == (ID, [])
    assert document["results"][0] == {"node": "9", "filename": "a.png", "subfolder": "x", "type": "output"}
    assert document["texts"] == {"4": ["8 tpu devices"]}
    assert [path.name for path in Path().iterdir()] == ["workflow.json"]


def test_what_validation_says(server, capsys):
    error = {"type": "prompt_outputs_failed_validation", "message": "Prompt outputs failed validation", "details": ""}
    refused = {"3": {"errors": [{"message": "Value not in list", "details": "model_id: 'x' not in ['demo']"}]}}
    server.refusal = (400, {"error": error, "node_errors": refused})
    said = "ComfyUI refuses the workflow: node 3 (KSampler): Value not in list: model_id: 'x' not in ['demo']"
    assert run(server, capsys, "--output", "results") == (1, "", f"comfy-tpu: {said}\n")
    server.refusal = (400, {"error": {"message": "Prompt has no outputs", "details": ""}, "node_errors": []})
    assert run(server, capsys)[2] == "comfy-tpu: ComfyUI refuses the workflow: Prompt has no outputs\n"
    # It takes a workflow of which one output node is wrong, and would run the others.
    server.refusal = (200, {"prompt_id": ID, "node_errors": refused})
    assert run(server, capsys)[2] == f"comfy-tpu: {said}\n"
    assert server.asked[-1] == ("/queue", {"delete": [ID]})
    assert not Path("results").exists()


@pytest.mark.parametrize(
    ("states", "said"),
    [
        (
            [0, entry({}, ["execution_start", {}], ["execution_error", {"node_id": "3", "exception_type": "MeshError",
             "exception_message": "this machine has\na TPU"}], status="error")],
            "node 3 (KSampler) failed: MeshError: this machine has a TPU",
        ),
        (
            [0, entry({}, ["execution_interrupted", {"node_id": "9"}], status="error")],
            "the workflow was cancelled at node 9 (SaveImage); run it again",
        ),
        ([0, entry(status="error")], "the workflow failed, and ComfyUI does not say where; its log does"),
        ([0, 0, "gone"], "the workflow is neither in the server's queue nor in its history"),
    ],
)  # fmt: skip
def test_what_ends_a_run(server, capsys, states, said):
    server.states = states
    status, out, err = run(server, capsys, "--output", "results")
    assert (status, out) == (1, "")
    assert err.splitlines()[-1].startswith(f"comfy-tpu: {said}")
    assert not Path("results").exists()


def test_a_run_that_ends_between_two_questions(server, capsys):
    server.states = ["gone", "gone", entry({"9": {"images": [image("a.png")]}})]
    assert run(server, capsys)[:2] == (0, "output/a.png\n")


def test_a_timeout(server, capsys, monkeypatch):
    server.states = [0]
    monkeypatch.setattr(running.time, "monotonic", iter(range(0, 1000, 20)).__next__)
    monkeypatch.setattr(running.run_workflow, "__kwdefaults__", {
        **running.run_workflow.__kwdefaults__, "clock": running.time.monotonic,
    })  # fmt: skip
    status, _, err = run(server, capsys, "--timeout", "50")
    assert status == 1
    assert f"--timeout 50 seconds were over before the workflow was done; it goes on at the server as {ID}" in err


def test_a_server_that_is_lost(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(running, "POLL_SECONDS", 0)
    file = tmp_path / "workflow.json"
    file.write_text(json.dumps(WORKFLOW))
    with serving() as server:
        answer = server.reply

        def leave(path, query, body):
            if path == "/queue":
                server.close()
            return answer(path, query, body)

        server.states, server.reply = [0], leave
        status, _, err = run(server, capsys, workflow=str(file))
    assert status == 1
    assert f"the server was lost while the workflow ran: server={server.url} does not answer (" in err
    status, _, err = run(server, capsys, workflow=str(file))
    assert status == 1
    assert err.startswith(f"comfy-tpu: --server {server.url} does not answer (")
    assert err.endswith("start ComfyUI there, or name another\n")


@pytest.mark.parametrize("reply", [(200, "<html>"), (404, "Not Found"), (200, "[]"), (200, "{}"), (500, "x")])
def test_something_else_than_comfyui(server, capsys, reply):
    server.refusal = reply
    status, out, err = run(server, capsys)
    assert (status, out) == (1, "")
    assert err.startswith(f"comfy-tpu: --server {server.url} does not answer as ComfyUI does (")


HOSTILE = [
    "../../evil.png",
    "/etc/passwd",
    "..\\..\\evil.png",
    "..",
    "",
    ".bashrc",
    "a\nb.png",
    "x" * 300 + ".png",
    "c:/d",
]


def test_whatever_the_server_calls_its_files_they_are_in_the_directory(server, capsys):
    server.states = [0, entry({"9": {"images": [image(name) for name in HOSTILE]}})]
    server.files = {("output", "", name): name.encode() for name in HOSTILE}
    Path("results").mkdir()
    outside = Path("outside.txt").absolute()
    Path("results/d").symlink_to(outside)
    status, out, _ = run(server, capsys, "--output", "results")
    assert status == 0
    made = {path.name: path.read_bytes() for path in Path("results").iterdir() if not path.is_symlink()}
    assert len(made) == len(HOSTILE) == len(out.splitlines())
    assert set(made.values()) == {name.encode() for name in HOSTILE}
    assert {"evil.png", "evil-1.png", "passwd", "result", "result-1", "bashrc", "a_b.png", "d-1"} < set(made)
    assert not outside.exists()
    assert sorted(path.name for path in Path().iterdir()) == ["results", "workflow.json"]


@pytest.mark.parametrize("name", [*HOSTILE, "é" * 200, "日" * 90 + ".webp"])
def test_plain_names(name):
    plain = plain_name(name)
    assert plain == Path(plain).name
    assert not plain.startswith(".")
    assert len(plain.encode()) <= 200


def test_nothing_that_is_there_is_replaced(server, capsys):
    for expected in ("a.png", "a-1.png", "a-2.png"):
        server.states = [0, entry({"9": {"images": [image("a.png")]}})]
        server.files = {("output", "", "a.png"): expected.encode()}
        assert run(server, capsys, "--output", "results")[1] == f"results/{expected}\n"
    assert {path.name: path.read_text() for path in Path("results").iterdir()} == {
        name: name for name in ("a.png", "a-1.png", "a-2.png")
    }


@pytest.mark.parametrize("is_cut", [True, False])
def test_all_files_or_none(server, capsys, is_cut):
    server.states = [0, entry({"9": {"images": [image("a.png"), image("b.png")]}})]
    server.files = {("output", "", "a.png"): b"A" * 100} | ({("output", "", "b.png"): b"B"} if is_cut else {})
    server.cut = is_cut
    status, out, err = run(server, capsys, "--output", "results")
    assert (status, out) == (1, "")
    assert ("of output/a.png, 50 of 100 bytes came" if is_cut else "does not give output/b.png (404 Not Found)") in err
    assert list(Path("results").iterdir()) == []


CANVAS = {"nodes": [{"id": 3, "type": "KSampler"}], "links": [], "version": 0.4}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            json.dumps(CANVAS),
            "is a workflow as the canvas saves it, and the API takes another form; open it in ComfyUI",
        ),
        ("{", "cannot be read ("),
        ("{}", "holds no nodes with a class_type each"),
        ("[1]", "holds no nodes with a class_type each"),
        ('{"3": {"inputs": {}}}', "holds no nodes with a class_type each"),
    ],
)
def test_a_file_that_is_no_workflow(server, capsys, content, said):
    Path("workflow.json").write_text(content)
    status, out, err = run(server, capsys, "--output", "results")
    assert (status, out) == (1, "")
    assert err.startswith(f"comfy-tpu: WORKFLOW workflow.json {said}")
    assert "choose Workflow > Export (API)" in err
    assert server.asked == []
    assert not Path("results").exists()


def test_a_workflow_as_it_is_posted(server, capsys):
    Path("workflow.json").write_text(json.dumps({"prompt": WORKFLOW, "client_id": "x"}))
    assert run(server, capsys)[0] == 0
    assert dict(server.asked)["/prompt"]["prompt"] == WORKFLOW


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--timeout", "soon"], "--timeout soon is not allowed; give seconds, more than 0"),
        (["--timeout", "0"], "--timeout 0.0 is not allowed"),
        (["--timeout", "nan"], "--timeout nan is not allowed"),
        (
            ["--server", "127.0.0.1:8188"],
            "--server '127.0.0.1:8188' is not an address; write it as the browser shows it",
        ),
        (["--server", "file:///etc"], "--server 'file:///etc' is not an address"),
        (["--server", "http://a b"], "--server 'http://a b' is not an address"),
        (["--server", "http://x:99999"], "--server 'http://x:99999' is not an address"),
        (["--output", ""], "--output is empty; give a path"),
        (["--output", "workflow.json"], "--output workflow.json is a file, expected a directory"),
        (["--output", "absent/results"], "--output absent/results is in absent, and there is no such directory"),
    ],
)
def test_flags_that_cannot_be_used(server, capsys, arguments, said):
    status, out, err = run(server, capsys, *arguments)
    assert (status, out) == (1, "")
    assert err.startswith(f"comfy-tpu: {said}")
    assert server.asked == []
    assert [path.name for path in Path().iterdir()] == ["workflow.json"]


def test_an_absent_workflow(server, capsys):
    assert run(server, capsys, workflow="no.json")[2].startswith("comfy-tpu: WORKFLOW no.json does not exist; give")


def test_addresses():
    assert Client("https://example.org:8443/comfy/").url == "https://example.org:8443/comfy"
