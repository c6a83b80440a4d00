import dataclasses
import json
import zipfile
from types import SimpleNamespace

import jax
import jax.export
import jax.numpy as jnp
import pytest

from comfy_tpu.cli import main as cli
from comfy_tpu.cli import plan_report
from comfy_tpu.config import MeshSizes
from comfy_tpu.distribution import install_command
from comfy_tpu.parallel.chips import CHIPS, parse_slice
from comfy_tpu.parallel.layouts import estimate
from comfy_tpu.planning import plan as planning
from comfy_tpu.planning.compilation import CompilationError, ProgramCounts, explain_refusal
from comfy_tpu.planning.plan import LayoutPlan
from comfy_tpu.planning.program_file import read_program
from tests.counted_work import published_work


def plan(capsys, *arguments):
    status = cli.main(["plan", "--no-compile", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "demo.plan"
    argv = ["plan", "demo", "--tpu", "v6e-4", "--mesh", "dp=2,sp=2", "--no-compile", "--export", str(path)]
    assert cli.main(argv) == 0
    return path


def test_tiles_are_the_calls_of_a_step(capsys):
    arguments = ("demo", "--tpu", "v6e-1", "--mesh", "single", "--size", "128x128x17")
    status, out, _ = plan(capsys, *arguments, "--tile", "64x64", "--tile-overlap", "0.5")
    assert status == 0
    assert "demo, 128x128x17: 80 tokens × 2, one call of 9 in a step (windows or tiles)" in out.splitlines()[0]
    status, _, err = plan(capsys, "Lightricks/LTX-2", "--tpu", "v6e-8", "--tile", "512x512")
    assert status == 1
    assert err.startswith("comfy-tpu: --tile 512x512 is for videos that are made at once, and Lightricks/LTX-2 makes")


@pytest.fixture(scope="module")
def planned(exported):
    """Counted once: the compiler takes seconds."""
    return planning.plan_program(read_program(exported), compile_=False)


def test_text(capsys, monkeypatch, exported, planned):
    monkeypatch.setattr(planning, "count_program", lambda *_: planned.chosen.partitioned)
    status, out, err = plan(capsys, "--from", exported)
    assert status == 0
    lines = out.splitlines()
    assert lines[0] == "demo, 64x64x17: 80 tokens × 2, one step"
    assert lines[1].startswith("v6e-4: 4 chips as 2x2; a device has 32.0 GB at 1,638 GB/s, 918 TFLOP/s")
    assert any(line.startswith("→  dp=2,sp=2,tp=1  yes") for line in lines)
    assert "sequence exchange (Ulysses)" in out
    assert "weight gather" in out
    assert "unexplained" not in out
    (sharding,) = (line for line in lines if line.startswith("Weights of the transformer, mesh dp=2,sp=2,tp=1: "))
    assert " stored in pieces and gathered (" in sharding
    assert lines[-1].startswith("Times are estimates: ")
    assert lines[-1].endswith("; nothing ran on a TPU.")
    assert "counting dp=2,sp=2,tp=1" in err


def test_why_the_compiler_was_not_asked(capsys, monkeypatch, exported, planned):
    def said(*arguments, machine="x86_64"):
        monkeypatch.setattr(plan_report.platform, "machine", lambda: machine)
        assert cli.main(["plan", *arguments, "--from", str(exported)]) == 0
        (line,) = (line for line in capsys.readouterr().out.splitlines() if "was not asked" in line)
        return line

    monkeypatch.setattr(planning, "has_tpu_compiler", lambda: False)
    monkeypatch.setattr(planning, "count_program", lambda *_: planned.chosen.partitioned)
    assert f"(libtpu is not installed: {install_command('tpu')})" in said()
    monkeypatch.setattr(
        planning, "plan_program", lambda _, *, compile_, **__: dataclasses.replace(planned, compiler_wanted=compile_)
    )
    assert said("--no-compile") == ("The TPU compiler was not asked (--no-compile): memory is the documented model.")
    assert "(libtpu is for x86_64 only: --export here and --from on such a machine)" in said(machine="aarch64")


def test_without_a_schedule_the_formula_stays(planned):
    wanted = dataclasses.replace(planned, schedule_wanted=True)
    (line,) = (line for line in plan_report.as_lines(wanted) if line.startswith("No schedule: "))
    assert line.endswith("The step's time is the formula's.")
    for refused in ("libtpu wrote no schedule: this version …", "a loop …"):
        counts = dataclasses.replace(planned.chosen.partitioned, schedule_refused=refused)
        layout = dataclasses.replace(planned.chosen, compiled=counts)
        lines = plan_report.as_lines(dataclasses.replace(wanted, layouts=(layout,), chosen=layout))
        assert f"No schedule: {refused}. The step's time is the formula's." in lines


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("Error: unknown topology v9x:2x2", "the TPU compiler does not know this topology"),
        (
            "RESOURCE_EXHAUSTED: scoped vmem limit exceeded",
            "the TPU compiler refused the program, because a kernel does",
        ),
    ],
    ids=["topology", "VMEM"],
)
def test_what_the_compiler_refuses_is_said_and_the_formula_stays(
    capsys, monkeypatch, exported, planned, tmp_path, reason, said
):
    def count(_program, mode, **_):
        if mode == "compile":
            raise CompilationError(explain_refusal("the TPU compiler", reason))
        return planned.chosen.partitioned

    monkeypatch.setattr(planning, "has_tpu_compiler", lambda: True)
    monkeypatch.setattr(planning, "count_program", count)
    image = tmp_path / "step.svg"
    assert cli.main(["plan", "--from", str(exported), "--schedule", "--schedule-image", str(image)]) == 0
    captured = capsys.readouterr()
    (line,) = (line for line in captured.out.splitlines() if line.startswith("No schedule: "))
    assert line == f"No schedule: {explain_refusal('the TPU compiler', reason)}. The step's time is the formula's."
    assert said in line
    assert f"{image} was not written: there is no schedule to draw" in captured.err
    assert not image.exists()


@pytest.mark.thorough  # by default: the other lines
def test_temporaries_of_other_generations_are_said_to_be_a_guess(capsys):
    _, out, _ = plan(capsys, "demo", "--tpu", "v5e-1")
    assert "v5e-1: 1 chip as 1x1; a device has 16.0 GB" in out
    assert (
        f"Temporaries are fitted on v6e, times {CHIPS['v5e'].temporaries:g} for v5e after what its compiler wants"
        in out
    )


def test_the_row_that_was_compiled_adds_up(planned):
    parts = {"argument": 50, "output": 7, "temp": 1000, "generated_code": 30, "alias": 5}
    compiled = ProgramCounts(
        source="compile",
        traffic=(),
        product_flops=None,
        kernel_flops=0.0,
        kernels=0,
        square_arrays=(),
        seconds=60.0,
        memory={f"{name}_size_in_bytes": value * 10**6 for name, value in parts.items()},
        cost={},
    )
    made = planned
    layout = dataclasses.replace(made.chosen, compiled=compiled)
    made = dataclasses.replace(made, layouts=(layout,), chosen=layout)
    assert layout.peak_bytes == 1_082_000_000 + layout.facts.unread_bytes
    lines = plan_report.as_lines(made)
    assert lines[3].split()[:7] == ["layout", "fits", "GB", "weights", "prompt", "latents", "temp."]
    total, *shown = lines[4].split()[3:8]
    assert sum(map(float, shown)) == pytest.approx(float(total), rel=0.01)
    (line,) = (line for line in lines if line.startswith("  Its "))
    assert "arguments 0.05, temporaries 1, results and the program itself 0.032; " in line
    assert f"temp. is all but weights, prompt and latents: {shown[-1]}." in line
    document = plan_report.as_document(made)["layouts"][0]
    assert document["memory"]["total"] == document["compiled"]["peak_bytes"] == layout.peak_bytes


def test_json(capsys, exported, planned, monkeypatch):
    monkeypatch.setattr(planning, "plan_program", lambda *_, **__: planned)
    status, out, _ = plan(capsys, "--from", exported, "--json")
    document = json.loads(out)
    assert status == 0
    assert document["schema"] == 1
    assert document["fits"] is True
    assert document["tpu"]["device"]["memory_bytes"] == 32_000_000_000
    (layout,) = document["layouts"]
    assert layout["mesh"] == document["chosen"] == {"dp": 2, "sp": 2, "tp": 1}
    assert layout["compiled"] is None
    assert layout["partitioned"]["unexplained"] == 0
    assert layout["partitioned"]["sent_bytes"] == sum(item["nbytes"] for item in layout["partitioned"]["traffic"]) > 0
    assert layout["seconds"]["step"] > 0
    assert document["estimate"].endswith("; nothing ran on a TPU.")
    sharding = layout["sharding"]
    assert sharding["mesh"] == layout["mesh"]
    assert sharding["gathered"]["bytes_per_device"] * 2 == sharding["gathered"]["nbytes"] > 0
    assert sharding["total"]["bytes_per_device"] == pytest.approx(layout["memory"]["weights"], rel=0.01)


def test_the_export_is_a_program_that_jax_reads(exported):
    with zipfile.ZipFile(exported) as archive:
        program = jax.export.deserialize(bytearray(archive.read("program.jax-export")))
    assert program.platforms == ("tpu",)
    assert program.nr_devices == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--tpu", "v9-8"], "--tpu 'v9-8': unknown generation 'v9'; choose from v5e, v5p, v6e, v7x"),
        (["demo", "--tpu", "v6e-0"], "--tpu 'v6e-0' is no slice of 1 to 256 chips; choose from v6e-1, v6e-2"),
        (["demo", "--tpu", "v6e-3"], "--tpu 'v6e-3' is no slice of 1 to 256 chips"),
        (["demo", "--tpu", "v6e-512"], "--tpu 'v6e-512' is no slice of 1 to 256 chips"),
        (["demo"], "plan needs a MODEL and --tpu, or --from"),
        (["--tpu", "v6e-8"], "plan needs a MODEL and --tpu, or --from"),
        (["demo", "--tpu", "v6e-8", "--size", "100x100x5"], "--size 100x100x5: height=100 is not divisible by 16"),
        (["demo", "--tpu", "v6e-8", "--size", "big"], "--size big is no size; write width×height×frames"),
        (["demo", "--tpu", "v6e-8", "--num-videos", "0"], "--num-videos 0 is not allowed"),
        (["owner/none", "--tpu", "v6e-8"], "MODEL owner/none is neither a directory nor a model"),
        (["demo", "--tpu", "v6e-8", "--mesh", "dp=5"], "--mesh dp=5,sp=1,tp=1 does not suit v6e-8 and this model"),
        (["demo", "--tpu", "v6e-8", "--mesh", "dp=2,sp=8"], "--mesh dp=2,sp=8,tp=1 needs 16 devices but there are 8"),
        (["demo", "--tpu", "v6e-8", "--export", "/no/such/place"], "--export /no/such/place is in /no/such"),
        (["demo", "--tpu", "v6e-8", "--schedule"], "--schedule comes from the TPU compiler; leave out --no-compile"),
        (["demo", "--tpu", "v6e-8", "--schedule-image", "a.svg"], "--schedule-image needs --schedule; add it"),
        (
            ["demo", "--tpu", "v6e-8", "--schedule", "--schedule-image", "a.png"],
            "--schedule-image a.png is no SVG file; end its name with .svg",
        ),
        (["--from", "/no/such/file"], "--from /no/such/file is not a file; give one that `comfy-tpu plan --export`"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_sentence(capsys, arguments, message):
    status, out, err = plan(capsys, *arguments)
    assert (status, out) == (1, "")
    assert err.count("\n") == 1
    assert err.startswith(f"comfy-tpu: {message}")


def test_a_file_brings_its_own(capsys, exported):
    status, _, err = plan(capsys, "demo", "--from", exported)
    assert (status, err) == (1, f"comfy-tpu: --from {exported} brings its own model; leave that out\n")


def test_files_that_are_none_of_ours(capsys, tmp_path, exported):
    path = tmp_path / "program"

    def refused(reason):
        status, out, err = plan(capsys, "--from", path)
        assert (status, out, err.count("\n")) == (1, "", 1)
        assert err.startswith(f"comfy-tpu: --from {path} {reason}")
        assert err.endswith("\n")

    path.write_text("not a program")
    refused("is not a program that `comfy-tpu plan --export` wrote (File is not a zip file); export it again")
    path.write_bytes(exported.read_bytes()[:5000])
    refused("is not a program that `comfy-tpu plan --export` wrote")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("something", "else")
    refused("is not a program that `comfy-tpu plan --export` wrote")
    changed(exported, path, header=lambda header: header | {"format": "comfy-tpu program 9"})
    refused("is a 'comfy-tpu program 9', expected 'comfy-tpu program 3'")
    changed(exported, path, header=lambda header: header | {"unknown": 1})
    refused("is damaged")
    changed(exported, path, header=lambda header: header | {"sizes": {"dp": 1, "sp": 2, "tp": 1}})
    refused("holds a program for 4 devices, but names mesh dp=1,sp=2,tp=1")
    changed(exported, path, program=lambda program: program[:1000])
    refused("is damaged")
    own = jax.export.export(jax.jit(jnp.sin))(jax.ShapeDtypeStruct((4,), "float32")).serialize()
    changed(exported, path, program=lambda program: bytes(own))
    refused("holds a program for cpu, expected one for tpu")
    path.write_bytes(own)
    refused("is not a program that `comfy-tpu plan --export` wrote")


def changed(source, target, *, header=lambda header: header, program=lambda program: program):
    with zipfile.ZipFile(source) as archive:
        old_header = json.loads(archive.read("plan.json"))
        old_program = archive.read("program.jax-export")
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("plan.json", json.dumps(header(old_header)))
        archive.writestr("program.jax-export", program(old_program))


def test_what_does_not_fit_is_said_and_is_the_exit_status(capsys):
    status, out, _ = plan(capsys, "wan2.1-t2v-14b-diffusers", "--tpu", "v6e-1")
    assert status == 1
    assert "dp=1,sp=1,tp=1 does not fit: 42.8 of 32.0 GB, and a tenth must stay free." in out
    assert "v6e-2 would do, as " in out


@pytest.mark.parametrize(
    ("tpu", "sizes", "batch", "lines"),
    [
        ("v6e-8", MeshSizes(dp=2, sp=4), 2, []),
        (
            "v6e-16",
            MeshSizes(dp=2, sp=8),
            2,
            [
                "4 hosts: start the same command on each, with --coordinator auto (",
                "The slice's own links go from host to host: no collective crosses the data centre's network.",
            ],
        ),
        (
            "2xv6e-8",
            MeshSizes(dp=2, sp=8),
            2,
            [
                "2 hosts: start the same command on each, with --coordinator auto (",
                "Over the data centre's network between 2 slices, 12.5 GB/s a device: guidance branches "
                "(collective-permute over dp) 0.0",
            ],
        ),
        (
            "2xv6e-8",
            MeshSizes(sp=16),
            1,
            [
                "2 hosts: start the same command on each, with --coordinator auto (",
                "Over the data centre's network between 2 slices, 12.5 GB/s a device: ",
                "Among them sp, in every layer: a batch of 1 does not give each slice its own part. Take one larger",
            ],
        ),
    ],
)
def test_what_crosses_the_network_is_told(tpu, sizes, batch, lines):
    work = dataclasses.replace(published_work("Wan2.1-T2V-14B-Diffusers"), batch=batch)
    slice_ = parse_slice(tpu)
    plan = SimpleNamespace(slice=slice_, work=work, chosen=LayoutPlan(estimate(work, sizes, slice_)))
    told = list(plan_report._host_lines(plan))
    assert len(told) == len(lines)
    for line, beginning in zip(told, lines, strict=True):
        assert line.startswith(beginning)
