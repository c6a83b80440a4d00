"""The command as a user meets it: verdicts, exit statuses, and what it says to a target that is none."""

import json
from pathlib import Path

import pytest

from comfy_tpu.bench.results import Row, Run, read_runs, write_runs
from comfy_tpu.cli.main import main
from comfy_tpu.porting.checklists import list_after_port, list_before_port
from comfy_tpu.porting.trial import Trial

CORPUS = Path(__file__).parents[1] / "porting" / "corpus"
INPUTS = ("--inputs", '{"x": [2, 4, 8]}')


def run(capsys, *arguments):
    status = main(["port", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def file(tmp_path):
    def write(text, name="model.py"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


MODEL = "import torch\n\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return x * 2\n"


def test_a_trap_is_told_with_its_line_its_reason_and_a_fix(capsys):
    status, out, _ = run(capsys, "check", "--static", f"{CORPUS}/mask_indexing.py:Trapped")
    assert status == 1
    assert "mask_indexing.py:9  mask-indexing" in out
    assert "return x[mask].sum(0) + x[~mask].sum(0)" in out
    assert "shapes must be known" in out
    assert "fix: keep all rows and use torch.where" in out
    assert "FAIL  No indexing by boolean masks (1 found, the first at" in out
    assert "Will not run: 1 line stops the trace, the first is " in out


def test_a_model_that_runs(capsys):
    status, out, _ = run(capsys, "check", f"{CORPUS}/mask_indexing.py:Mended", *INPUTS)
    assert status == 0
    assert "Will run: traced, lowered for a TPU, and" in out
    assert out.count("  pass  ") == 9
    assert "FAIL" not in out


def test_json_has_the_keys_that_it_promises(capsys):
    status, out, _ = run(capsys, "check", "--json", f"{CORPUS}/missing_operator.py:Trapped", *INPUTS)
    document = json.loads(out)
    (check,) = document["checks"]
    assert (status, document["schema"], document["blocked"]) == (1, 1, True)
    assert set(check) == {
        *("target", "file", "verdict", "why", "findings", "before", "after", "operators", "operators_end", "error"),
        "config",
    }
    missing = [each for each in check["operators"] if each["by"] == "missing"]
    assert [each["name"] for each in missing] == [
        "aten.special_airy_ai.default",
        "aten.special_scaled_modified_bessel_k0.default",
    ]
    assert set(check["findings"][0]) == {
        *("trap", "severity", "file", "line", "code", "reason", "fix", "guide", "reached")
    }


def test_operators_are_listed_with_who_implements_them(capsys):
    status, out, _ = run(capsys, "ops", f"{CORPUS}/missing_operator.py:Trapped", *INPUTS)
    rows = {line.split()[0]: line.split()[1] for line in out.splitlines()[:-2]}
    assert status == 1
    assert rows["aten.add"] == "torchax"
    assert rows["aten.special_airy_ai.default"] == "missing"
    assert "2 missing." in out
    status, out, _ = run(capsys, "ops", f"{CORPUS}/square_mask.py:Mended", *INPUTS)
    assert status == 0
    assert "torch.nn.functional.scaled_dot_product_attention  comfy-tpu  override" in out


def test_operators_that_are_not_all_are_said_not_to_be(capsys, file):
    ends = "x.abs() if type(x) is torch.Tensor else x.abs() * [][0]"
    status, out, _ = run(capsys, "ops", path := file(MODEL.replace("x * 2", ends)), *INPUTS)
    assert status == 1
    assert out.splitlines()[-1].startswith(f"The list ends at {path}:5: IndexError: list index out of range; ")


def test_reading_runs_nothing(capsys, file, tmp_path):
    witness = tmp_path / "ran"
    path = file(f"open({str(witness)!r}, 'w').close()\n{MODEL}")
    assert run(capsys, "check", "--static", path)[0] == 0
    assert not witness.exists()
    assert run(capsys, "check", path, *INPUTS)[0] == 0
    assert witness.exists()


def test_a_class_is_chosen_if_only_one_can_be_meant(capsys, file):
    inner = "class Inner(torch.nn.Module):\n    pass\n"
    path = file(f"{MODEL}        self.inner = Inner()\n\n{inner}")
    assert run(capsys, "check", "--static", path)[1].startswith("Model ")
    path = file(f"{MODEL}\n{inner}")
    status, _, err = run(capsys, "check", "--static", path)
    assert status == 1
    assert "has 2 models that are no part of another (Model, Inner); say which" in err


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("NoSuchModel", "diffusers has no class NoSuchModel; give one of its models"),
        ("absent.py", "there is no absent.py; give a Python file"),
        ("absent.py:Model", "there is no absent.py; give a Python file"),
        ("no_such_package:Model", "there is no package no_such_package here; install it"),
        ("json:NoSuchClass", "json has no class NoSuchClass; give module:Class"),
        (f"{CORPUS}/complex.py:Other", "complex.py has no model class Other; it has Trapped, Mended"),
        (str(CORPUS), "has neither model_index.json nor config.json"),
    ],
)
def test_what_is_no_target_is_explained(capsys, target, said):
    status, out, err = run(capsys, "check", target)
    assert (status, out) == (1, "")
    assert err.startswith("comfy-tpu: ")
    assert said in err
    assert len(err.splitlines()) == 1


def test_a_syntax_error_is_told_with_its_line(capsys, file):
    status, _, err = run(capsys, "check", "--static", file("class Model(:\n    pass\n"))
    assert status == 1
    assert "model.py:1 is not Python (" in err


@pytest.mark.parametrize("content", [b"x = '\xff'\n", b"x = 1\0\n", bytes(range(256))])
def test_what_is_no_text_is_refused(capsys, tmp_path, content):
    (tmp_path / "model.py").write_bytes(content)
    status, _, err = run(capsys, "check", "--static", tmp_path / "model.py")
    assert status == 1
    assert "is not Python (" in err


def test_what_a_class_needs_is_asked_for(capsys, file):
    path = file(
        MODEL.replace("    def forward", "    def __init__(self, width):\n        super().__init__()\n    def forward")
    )
    status, out, _ = run(capsys, "check", path, *INPUTS)
    assert status == 1
    assert "Not tried: Model cannot be built without width; give them: --config '{\"width\": 32}'." in out
    assert run(capsys, "check", path, *INPUTS, "--config", '{"width": 3}')[0] == 0
    status, out, _ = run(capsys, "check", path, "--config", '{"width": 3}')
    assert "Model.forward needs 'x', and nothing says what that is; give it with --inputs '{\"x\": [1, 16]}'" in out


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--inputs", "{", "--inputs is not JSON"),
        ("--inputs", "[1]", "--inputs is a list, expected an object"),
        ("--inputs", '{"y": [1]}', "names 'y', which forward does not take; it takes x"),
        ("--inputs", '{"x": {"sizes": [1]}}', 'x is an object with sizes; expected {"shape"'),
        ("--inputs", '{"x": {"shape": [1], "dtype": "f32"}}', "there is no dtype f32; use float32"),
        ("--inputs", '{"x": {"shape": "ab"}}', "x has the shape 'ab', expected a list of sizes such as [1, 16]"),
        ("--inputs", '{"x": [-1]}', "x has the shape [-1], expected a list of sizes"),
        ("--inputs", '{"x": {"value": "ab", "dtype": "int64"}}', "x has the value 'ab', of which no tensor can be"),
        ("--inputs", '{"x": {"value": 1, "dtype": 3}}', "there is no dtype 3; use float32"),
        ("--config", "3", "--config is a int, expected an object"),
    ],
)
def test_bad_options_are_explained(capsys, file, option, value, said):
    status, _, err = run(capsys, "check", file(MODEL), option, value)
    assert status == 1
    assert said in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--inputs", '{"x": "abc"}'], "PyTorch itself does not run it here (TypeError: "),
        ([*INPUTS, "--config", '{"depth": 1}'], "Model cannot be built (TypeError: "),
    ],
)
def test_operators_of_what_does_not_run_are_not_listed(capsys, file, options, said):
    status, out, err = run(capsys, "ops", file(MODEL.replace("x * 2", "torch.sin(x)")), *options)
    assert (status, out) == (1, "")
    assert said in err
    assert "give --config and --inputs that it accepts" in err
    assert len(err.splitlines()) == 1


def test_a_file_without_a_model(capsys, file):
    status, _, err = run(capsys, "check", file("x = 1\n"))
    assert status == 1
    assert "model.py has no model, which is a class that extends nn.Module; give the file of one" in err


def test_what_pytorch_does_not_run_is_not_said_to_be_ours(capsys, file):
    path = file(MODEL.replace("x * 2", "x @ x"))
    status, out, _ = run(capsys, "check", path, "--inputs", '{"x": [2, 3]}')
    assert status == 1
    assert "Not tried: PyTorch itself does not run it here (RuntimeError: " in out
    assert "model.py:5" in out


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (
            "AuraFlowPipeline",
            "AuraFlowPipeline is a pipeline, not a model; check its parts (AutoencoderKL, AuraFlowTransformer2DModel), "
            "or use comfy-tpu port new NAME --from AuraFlowPipeline",
        ),
        ("FlowMatchEulerDiscreteScheduler", "of diffusers is not a model, which is a class that extends nn.Module"),
    ],
)
def test_a_class_that_is_no_model_is_refused(capsys, target, said):
    status, out, err = run(capsys, "check", "--static", target)
    assert (status, out) == (1, "")
    assert said in err


def test_a_class_of_a_module_that_is_no_model_is_refused(capsys):
    status, _, err = run(capsys, "check", "collections:OrderedDict")
    assert status == 1
    assert "OrderedDict is not a model, which is a class that extends nn.Module; give one" in err


def test_a_name_that_a_star_brings_is_found(capsys):
    status, out, _ = run(capsys, "check", "--static", "torch.nn:Linear")
    assert status == 0
    assert out.startswith("Linear  ")


def test_a_file_that_ends_the_program_is_not_tried(capsys, file):
    status, out, _ = run(capsys, "check", file("import sys\nsys.exit(3)\n" + MODEL), *INPUTS)
    assert status == 1
    assert "model.py cannot be imported (SystemExit: 3); mend that, or only read it: comfy-tpu port check --sta" in out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("def __init__(self):\n        raise SystemExit(3)", "Model cannot be built (SystemExit: 3); give --config"),
        ("def forward(self, x):\n        raise SystemExit(3)", "PyTorch itself does not run it here (SystemExit: 3 at"),
    ],
    ids=["built", "run"],
)
def test_a_model_that_ends_the_program_ends_its_trial_only(capsys, file, line, said):
    path = file(f"{MODEL}\n    {line}\n")
    status, out, _ = run(capsys, "check", path, *INPUTS)
    assert status == 1
    assert said in out
    status, _, err = run(capsys, "ops", path, *INPUTS)
    assert status == 1
    assert said in err


def test_a_file_of_a_package_is_to_be_named_by_it(capsys, file, tmp_path, monkeypatch):
    (tmp_path / "drawing").mkdir()
    file("", "drawing/__init__.py")
    file("def twice(x):\n    return x * 2\n", "drawing/parts.py")
    path = file(MODEL.replace("import torch", "import torch\nfrom .parts import twice", 1), "drawing/model.py")
    status, out, _ = run(capsys, "check", path, *INPUTS)
    assert status == 1
    assert "name it by its package, from the folder above that: package.model:Model" in out
    monkeypatch.syspath_prepend(tmp_path)
    status, out, _ = run(capsys, "check", "drawing.model:Model", *INPUTS)
    assert status == 0, out


@pytest.mark.parametrize("command", ["check", "ops"])
def test_what_a_model_prints_is_not_in_the_json(capsys, file, command):
    status, out, err = run(capsys, command, file(MODEL.replace("return", "print('hello'); return")), *INPUTS, "--json")
    assert status == 0
    assert json.loads(out)["schema"] == 1
    assert "hello" in err


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model_index.json", '{"transformer": [], "vae": ["diffusers"]}', "names no model of diffusers with a config"),
        ("config.json", '{"_class_name": "NoSuchModel"}', "config.json says _class_name 'NoSuchModel': diffusers has"),
        ("config.json", '{"_class_name": 3}', "config.json does not say _class_name"),
    ],
)
def test_a_directory_that_names_no_model(capsys, tmp_path, name, content, said):
    (tmp_path / name).write_text(content)
    status, _, err = run(capsys, "check", tmp_path)
    assert status == 1
    assert said in err
    assert len(err.splitlines()) == 1


def test_a_directory_is_its_models(capsys, tmp_path):
    (tmp_path / "vae").mkdir()
    (tmp_path / "model_index.json").write_text('{"_class_name": "P", "vae": ["diffusers", "AutoencoderTiny"]}')
    (tmp_path / "vae" / "config.json").write_text('{"_class_name": "AutoencoderTiny", "latent_channels": 6}')
    status, out, _ = run(capsys, "check", "--json", tmp_path)
    (check,) = json.loads(out)["checks"]
    assert (status, check["target"], check["verdict"]) == (0, "AutoencoderTiny", "will run")
    assert check["config"]["latent_channels"] == 6


def test_the_checklists_have_the_guides_items():
    assert [len(items) for items in (list_before_port([], None, has_family=False), list_after_port(None))] == [7, 4]
    passed = Trial(traced=True, low_precision="float32", arrays_left=2)
    assert [item.status for item in list_after_port(passed, ["worker"])] == ["fail", "fail", "fail", "not applicable"]


def measured(path, seconds, expected, *, name="Mended", date="2026-11-16T10:00:00+00:00"):
    facts = {"classes": [name], **({"expected_s": expected} if expected else {})}
    rows = (
        Row("transformer", "forward", "ours", size="832x480x81", samples=(1.0,), facts={**facts}),
        Row("transformer", "forward", "ours", size="1280x720x81", samples=(9.0, seconds, 0.1), facts=facts),
        Row("transformer", "forward", "eager", size="1280x720x81", samples=(99.0,), facts=facts),
    )
    run = Run(date, "comfy-tpu bench", "some/model", "bfloat16", {"device": "TPU v6 lite"}, {}, rows, "dp=2,sp=4,tp=1")
    write_runs(path, [*(read_runs(path) if path.exists() else []), run])


def speed_item(capsys, path, *flags):
    _, out, err = run(capsys, "check", "--static", "--json", f"{CORPUS}/mask_indexing.py:Mended", *flags)
    return json.loads(out)["checks"][0]["after"][-1] if out else err


MEASURED_BY = "; on the TPU: comfy-tpu bench --what transformer --peers ours --model MODEL --mesh auto --json FILE"


def test_speed_is_compared_with_the_plans_estimate(capsys, tmp_path):
    path = tmp_path / "bench.json"
    item = speed_item(capsys, path)
    assert item["status"] == "not applicable"
    assert item["note"] == f"not measured{MEASURED_BY}, then --bench FILE"
    measured(path, 4.0, 3.2)
    item = speed_item(capsys, path, "--bench", path)
    assert item["text"] == "It is as fast as expected"
    assert (item["status"], item["note"]) == (
        "pass",
        "4 s a step at 1280x720x81 on TPU v6 lite, mesh dp=2,sp=4,tp=1, 1.25 times the plan's 3.2 s; 1.5 are allowed",
    )
    measured(path, 5.0, 3.2)  # a later run
    assert speed_item(capsys, path, "--bench", path)["status"] == "fail"


def test_results_that_say_nothing_of_the_model(capsys, tmp_path):
    path = tmp_path / "bench.json"
    measured(path, 4.0, None)
    item = speed_item(capsys, path, "--bench", path)
    assert item["status"] == "not applicable"
    assert item["note"].startswith(f"{path} has a step on TPU v6 lite, of which the plan says nothing{MEASURED_BY}")
    path.unlink()
    measured(path, 4.0, 3.2, name="Other")
    assert speed_item(capsys, path, "--bench", path)["note"].startswith(f"{path} has no step of Mended; on the TPU: ")


@pytest.mark.parametrize("content", [None, "{", '{"schema": 1}'])
def test_a_file_that_has_no_results(capsys, tmp_path, content):
    path = tmp_path / "bench.json"
    if content is not None:
        path.write_text(content)
    status, out, err = run(capsys, "check", "--static", f"{CORPUS}/mask_indexing.py:Mended", "--bench", path)
    assert (status, out) == (1, "")
    assert err.startswith(f"comfy-tpu: {path} is not a file of benchmark results (")
