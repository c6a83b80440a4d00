"""--verbose, --profile and --dump: what they write, and that a run that is refused writes nothing.

tests/cli/test_demo.py runs the demo model with all three.
"""

import json
import logging
from pathlib import Path

import jax
import pytest

from comfy_tpu.cli import main as cli
from comfy_tpu.compiler.program import DeviceProgram
from comfy_tpu.pipeline import program_dump, video
from tests.cli.fake_pipeline import FakePipeline


@pytest.fixture
def directory(monkeypatch, tmp_path):
    """The current one, with the fake pipeline."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(video, "VideoPipeline", FakePipeline)
    return tmp_path


def test_a_profile_is_where_both_viewers_look(directory, capsys):
    assert cli.main(["generate", "x", "-o", "x.gif", "--profile", "traces", "--json"]) == 0
    (perfetto,) = directory.glob("traces/plugins/profile/*/perfetto_trace.json.gz")
    assert list(perfetto.parent.glob("*.xplane.pb"))
    out, err = capsys.readouterr()
    assert json.loads(out)["profile"] == "traces"
    place = perfetto.relative_to(directory)
    assert err == (
        f"comfy-tpu: profile: open {place} at https://ui.perfetto.dev, or run: tensorboard --logdir traces\n"
    )


def test_a_run_that_fails_ends_its_profile(directory, monkeypatch):
    def decode(self, latents, settings):
        self._begin("decode", "vae", "")
        raise RuntimeError("broken")

    monkeypatch.setattr(FakePipeline, "decode", decode)
    with pytest.raises(RuntimeError, match="broken"):
        cli.main(["generate", "x", "-o", "x.gif", "--profile", "traces"])
    assert list(directory.glob("traces/plugins/profile/*/*.xplane.pb"))
    jax.profiler.start_trace(str(directory / "another"))  # no earlier one is recording
    jax.profiler.stop_trace()


@pytest.mark.parametrize("flag", ["--profile", "--dump"])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "is empty; give a path"),
        ("file", "file is a file, expected a directory; choose another name"),
        ("file/x", "file/x is in file, and there is no such directory; create it"),
        ("absent/x", "absent/x is in absent, and there is no such directory; create it"),
        ("x" * 300, f"{'x' * 60}… is too long: 300 bytes in one part"),
    ],
)
@pytest.mark.parametrize("command", [["generate", "x"], ["encode", "x"]], ids=lambda words: words[0])
def test_a_directory_that_cannot_be_written(directory, capsys, command, flag, value, said):
    Path("file").touch()
    assert cli.main([*command, flag, value]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"comfy-tpu: {flag} {said}")
    assert [path.name for path in directory.iterdir()] == ["file"]


@pytest.mark.parametrize("refused", [["--model", "absent"], ["--height", "17"], ["--output", "x.txt"]], ids=" ".join)
def test_a_run_that_is_refused_leaves_neither(directory, refused):
    assert cli.main(["generate", "x", "--profile", "traces", "--dump", "programs", *refused]) == 1
    assert list(directory.iterdir()) == []


def test_stages_take_the_flags(directory, capsys):
    for name in ("denoise", "decode"):
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        out = capsys.readouterr().out
        assert all(flag in out for flag in ("--verbose", "--profile DIR", "--dump DIR"))


@pytest.mark.parametrize(("flags", "lines"), [([], 1), (["--verbose"], 2)])
def test_verbose_shows_what_is_logged_at_info(directory, capsys, monkeypatch, flags, lines):
    logger = logging.getLogger("comfy_tpu.compiler.residency")

    def begin(*_):
        logger.warning("careful")
        logger.info("demo vae is loaded; mesh dp=1,sp=1,tp=1: 2 tensors\ncould not be split: x")

    monkeypatch.setattr(FakePipeline, "_begin", begin)
    level = logging.getLogger("comfy_tpu").level
    assert cli.main(["encode", "x", *flags]) == 0
    shown = capsys.readouterr().err.replace("\n  ", " ").splitlines()
    assert (
        shown
        == [
            "comfy-tpu: careful",
            "comfy-tpu: demo vae is loaded; mesh dp=1,sp=1,tp=1: 2 tensors could not be split: x",
        ][:lines]
    )
    assert logging.getLogger("comfy_tpu").level == level


class Doubled(DeviceProgram):
    """A program of one line."""

    def _call(self, weights, inputs):
        return weights["w"] * inputs["x"]

    def _check_weights(self, weights):
        pass


def test_the_texts_of_a_program(tmp_path):
    events = []
    program = Doubled("vae.decode/frame", lambda x: x, placement=None, on_event=events.append)
    for length in (3, 5):
        program({"w": jax.numpy.ones(length)}, x=jax.numpy.ones(length))
    made = [event.stages for event in events if event.stages is not None]
    assert len(made) == 2
    names = []
    for stages in (*made, made[0]):
        paths = program_dump.dump_program(tmp_path / "programs", "vae.decode/frame", "64×32×5", stages)
        jaxpr, stablehlo, hlo = (path.read_text() for path in paths)
        assert "mul" in jaxpr
        assert "stablehlo.multiply" in stablehlo
        assert hlo.startswith("HloModule jit_vae_decode")
        names.append(paths[0].name)
        assert [path.name.partition(".jaxpr")[0].partition(".stablehlo")[0] for path in paths[:2]] == [
            names[-1].removesuffix(".jaxpr.txt")
        ] * 2
    assert names[0] == names[2] != names[1]
    assert all(name.startswith("vae.decode-frame-64x32x5-") for name in names)
    assert len(list((tmp_path / "programs").iterdir())) == 6
