import importlib.metadata
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from comfy_tpu.bench import plots, report
from comfy_tpu.bench.job import LOSSY_PEERS
from comfy_tpu.bench.page_texts import ENGLISH, LANGUAGES, read_texts
from comfy_tpu.bench.report import RunFiles, draw_run, format_tables
from comfy_tpu.bench.results import Row, read_runs, write_runs
from comfy_tpu.bench.tables import TITLES, floor_seconds, format_seconds, make_table, speedup
from comfy_tpu.distribution import install_command
from comfy_tpu.errors import InvalidValueError, UnsupportedError
from tests.bench.test_results import make_run
from tests.pins import only_with_the_pinned

# numpy: the last digit of a plot's coordinates is its.
PLOTTED = {name: importlib.metadata.version(name) for name in ("matplotlib", "numpy", "tabulate")}
ROOT = Path(__file__).parents[2]
SIZE = "832x480x81"


def narrow(text):
    """Tables without the padding of their columns."""
    return re.sub(r" *(?<!\\)\| *", " | ", text)


def forward(peer, *samples, **more):
    facts = {"tokens": 32_760, "attention_flops": 1e15}
    return Row("transformer", "forward", peer, size=SIZE, samples=samples, flops=2e15, facts=facts, **more)


PEERS = (forward("ours", 2.5, 2.4, 2.6), forward("eager", 3.0), forward("compile", failure="no | compiler"))
CEILINGS = (
    Row("ceilings", "matmul 1×2×3", "jax", size=SIZE, samples=(1.0,), flops=500e12),
    Row("ceilings", "matmul 1×2×3", "torch", size=SIZE, samples=(1.0,), flops=1000e12),
    Row("ceilings", "attention", "jax cuDNN", size=SIZE, samples=(1.0,), flops=500e12),
)


def test_tables_compare_within_the_run():
    text = narrow(format_tables(make_run(*PEERS, *CEILINGS)))
    lines = {line.split("|")[3].strip(): line for line in text.splitlines() if line.startswith(" | forward")}
    assert "2.50 s | 2.40 s – 2.60 s | 3 | 800 | 120% |" in lines["**comfy-tpu**"]
    assert "1.20×" in lines["diffusers eager"]
    assert "no \\| compiler" in lines["diffusers + torch.compile"]


def test_blocks_compiled_one_by_one_are_named_so():
    rows = (forward("ours", 2.5), forward("compile", 2.8))
    regional = make_run(*rows, command="comfy-tpu bench --compile-regional")
    assert "torch.compile of each block |" in narrow(format_tables(regional))
    assert "torch.compile |" in narrow(format_tables(make_run(*rows)))
    assert "torch.compile of each block<" in draw_run(regional)


@pytest.mark.parametrize("peer", LOSSY_PEERS)
def test_lossy_peers_are_compared_with_ours_alone(peer):
    run = make_run(*PEERS, forward(peer, 2.0), *CEILINGS)
    lines = format_tables(run).splitlines()
    (line,) = (line for line in lines if f"{peer} (lossy)" in line)
    cells = dict(zip(*([cell.strip() for cell in each.split("|")] for each in (lines[2], line)), strict=True))
    assert cells[f"{peer} is faster"] == "1.25×"
    assert (cells["TFLOP/s"] == "") == (peer == "fast"), "it leaves out forwards"
    assert cells["ours is faster"] == cells["of the floor"] == "", "the ceilings are not those of 8 bits"


def test_the_floor_is_products_and_attention_each_at_their_best():
    run = make_run(*PEERS, *CEILINGS)
    assert floor_seconds(run, PEERS[0]) == pytest.approx(1.0 + 2.0)
    assert floor_seconds(make_run(*PEERS), PEERS[0]) is None
    assert speedup(run, PEERS[0]) is None
    assert speedup(run, PEERS[1]) == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("value", "text"),
    [(154.7, "155 s"), (2.618, "2.62 s"), (0.5, "0.5 s"), (0.0123, "12.3 ms"), (3.2e-5, "32 µs")],
)
def test_seconds(value, text):
    assert format_seconds(value) == text


def test_the_last_run_of_every_size_counts(tmp_path):
    old = make_run(forward("ours", 9.0), date="2026-01-01T00:00:00+00:00")
    new = make_run(forward("ours", 2.0), forward("eager", 4.0), date="2026-01-05T00:00:00+00:00")
    text = make_run(Row("text", "encode 512 tokens", "ours", samples=(0.02,)), date="2026-01-03T00:00:00+00:00")
    write_runs(tmp_path / "a.json", [new, text])
    write_runs(tmp_path / "b.json", [old])
    (page, picture) = report.write_page([tmp_path / "a.json", tmp_path / "b.json"], tmp_path / "performance.md")
    words = page.read_text()
    assert "2.00×" in words
    assert "9.00 s" not in words
    assert "encode 512 tokens" in words
    assert f"({picture.name})" in words
    assert "## H200, Wan2.1-T2V-14B-Diffusers, bfloat16" in words
    assert "1 × H200 (128 GiB); driver 580.1; a processor, 2 cores, 16 GiB." in words
    assert words.count("2026-01-0") == 2, "runs that nothing is taken from are not listed"
    assert "jax 0.11.2" in words
    ET.fromstring(picture.read_text())


def test_what_the_last_run_left_out_is_taken_from_the_one_before(tmp_path):
    decode, encode = (Row("vae", what, "ours", size=SIZE, samples=(1.0,)) for what in ("decode", "encode"))
    earlier = make_run(decode, encode, date="2026-01-01T00:00:00+00:00")
    later = make_run(
        Row("vae", "decode", "ours", size=SIZE, samples=(3.0,)),
        Row("vae", "decode", "eager", size=SIZE, samples=(6.0,)),
        date="2026-01-02T00:00:00+00:00",
    )
    found = report.latest_rows([earlier, later], "vae")
    assert [(run.date[9], row.what, row.peer) for run, row in found] == [
        ("2", "decode", "ours"),
        ("2", "decode", "eager"),
        ("1", "encode", "ours"),
    ]


def test_a_run_that_failed_does_not_hide_one_that_measured():
    dates = [f"2026-01-0{day}T00:00:00+00:00" for day in (1, 2)]
    error = Row("accuracy", "forward of 2 blocks", "ours", size=SIZE, error=0.01)
    for good, bad in (
        (forward("ours", 2.0), forward("ours", failure="OutOfMemoryError")),
        (error, Row("accuracy", "forward of 2 blocks", "ours", size=SIZE, failure="OutOfMemoryError")),
    ):
        runs = [make_run(good, date=dates[0]), make_run(bad, date=dates[1])]
        assert report.latest_rows(runs, good.part) == [(runs[0], good)]
        assert report.latest_rows(runs[1:], good.part) == [(runs[1], bad)], "where nothing else is known"


def test_a_page_in_two_languages_has_the_same_figures(tmp_path):
    write_runs(tmp_path / "a.json", [make_run(*PEERS, *CEILINGS, mesh="dp=2,sp=1,tp=4")])
    english, chinese, *pictures = report.write_page([tmp_path / "a.json"], tmp_path / "page.md", LANGUAGES)
    assert (english.name, chinese.name) == ("page.md", "page.zh-CN.md")
    assert all(f"({picture.name})" in page.read_text() for picture in pictures for page in (english, chinese))
    assert "[简体中文](page.zh-CN.md)" in english.read_text()
    assert "[English](page.md)" in chinese.read_text()
    number = re.compile(r"(?<!\|)\d[\d.,]*")
    rows = [[line for line in page.read_text().splitlines() if line.startswith("|")] for page in (english, chinese)]
    assert len(rows[0]) == len(rows[1])
    for ours, theirs in zip(*rows, strict=True):
        assert number.findall(ours) == number.findall(theirs), theirs
    assert "| forward | 832x480x81 | **comfy-tpu** | 32,760 | 2.50 s |" in narrow(chinese.read_text())
    assert "### Transformer，一次前向" in chinese.read_text()


def test_one_language_has_no_link_to_another(tmp_path):
    write_runs(tmp_path / "a.json", [make_run(*PEERS)])
    page, *_ = report.write_page([tmp_path / "a.json"], tmp_path / "page.md")
    assert "zh-CN" not in page.read_text()
    assert not (tmp_path / "page.zh-CN.md").exists()


def test_every_title_has_chinese():
    filled = {"mesh": "dp=2", "batch": 2, "devices": 8, "tokens": 9, "import_s": 1.0, "build_s": 1.0, "trace_s": 1.0}
    filled |= {"lower_s": 1.0, "compile_s": 1.0, "programs": 1, "from_cache": True, "flops_per_device": 1.0, "steps": 5}
    filled |= {"sdpa": "CUDNN_ATTENTION"}
    row = Row("vae", "decode", "ours", size=SIZE, samples=(1.0, 2.0), flops=1e15, error=0.1, first_s=1.0, facts=filled)
    chinese = read_texts("zh-CN")
    table = make_table([(make_run(row), row)], chinese)
    assert "| 是 |" in table
    assert [chinese.translate(title) for title in TITLES.values()][-1] == "开销随 token 数和设备数的变化"
    message = "'a new title' has no translation into zh-CN; add it to locales/zh/performance.json"
    with pytest.raises(InvalidValueError, match=message):
        chinese.translate("a new title")
    assert ENGLISH.translate("a new title") == "a new title"


def test_a_missing_file_of_texts_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("comfy_tpu.bench.page_texts.find_locale", lambda locale, name: tmp_path / locale / name)
    write_runs(tmp_path / "a.json", [make_run(*PEERS)])
    with pytest.raises(UnsupportedError, match=r"a page in zh-CN needs .*zh/performance\.json, .*; restore it: git"):
        report.write_page([tmp_path / "a.json"], tmp_path / "page.md", LANGUAGES)
    assert not (tmp_path / "page.md").exists()


def test_pages_that_cannot_be_made(tmp_path):
    write_runs(tmp_path / "empty.json", [])
    with pytest.raises(InvalidValueError, match="no run is in there; measure with `comfy-tpu bench`"):
        report.write_page([tmp_path / "empty.json"], tmp_path / "x.md")
    with pytest.raises(InvalidValueError, match=r"x\.txt is Markdown; give it a name in \.md"):
        report.write_page([tmp_path / "empty.json"], tmp_path / "x.txt")


def scaling(tokens, seconds_, peer="ours"):
    facts = {"tokens": tokens}
    return Row("scaling", "forward", peer, size=f"{tokens}", samples=(seconds_,), flops=float(tokens**2), facts=facts)


def over_devices(count):
    facts = {"tokens": 99, "devices": count, "flops_per_device": 1e9 / count}
    return Row("scaling", f"small model on {count} virtual CPU devices", "ours", samples=(2.0,), facts=facts)


def with_run(*rows, **more):
    return [(make_run(*rows, **more), row) for row in rows]


def test_exponents_are_those_of_the_points():
    rows = [scaling(tokens, 1e-6 * tokens**1.5) for tokens in (8_000, 16_000, 76_000)]
    rows += [scaling(8_000, 1.0, "eager"), *(over_devices(count) for count in (1, 2, 4, 8))]
    found = with_run(*rows)
    series = plots.make_series(found)
    exponents = {one.name: one.fit[1] for one in (*series["tokens"], *series["devices"])}
    assert exponents == pytest.approx(
        {
            "comfy-tpu": 1.5,
            "operations, counted": 2.0,
            "wall time": 0.0,
            "operations a device, by XLA": -1.0,
        },
        abs=1e-9,
    )
    assert "| comfy-tpu | tokens | 8,000 – 76,000 | 1.50 |" in narrow(plots.exponent_table(found))
    for text in plots.draw_scaling(found).values():
        ET.fromstring(text)


def test_a_forward_of_another_size_is_one_more_point():
    rows = [scaling(tokens, 1e-3 * tokens) for tokens in (8_000, 16_000)]
    again = Row("transformer", "forward", "ours", size="16000", samples=(99.0,), flops=1.0, facts={"tokens": 16_000})
    other = Row("transformer", "forward", "ours", size="76000", samples=(76.0,), flops=1.0, facts={"tokens": 76_000})
    assert "| comfy-tpu | tokens | 8,000 – 76,000 | 1.00 |" in narrow(
        plots.exponent_table(with_run(*rows, again, other))
    )


def test_blocks_compiled_one_by_one_are_no_point_of_the_whole():
    def compiled(tokens, seconds_):
        return Row("transformer", "forward", "compile", size=f"{tokens}", samples=(seconds_,), facts={"tokens": tokens})

    small, large, larger = compiled(8_000, 1.0), compiled(16_000, 2.0), compiled(32_000, 4.0)
    regional = "comfy-tpu bench --compile-regional"
    assert plots.exponent_table([*with_run(small), *with_run(large, command=regional)]) == ""
    assert "| diffusers + torch.compile | tokens | 8,000 – 16,000 | 1.00 |" in narrow(
        plots.exponent_table(with_run(small, large))
    )
    found = [*with_run(small, large), *with_run(large, larger, command=regional)]
    assert [one.name for one in plots.make_series(found)["tokens"]] == [
        "diffusers + torch.compile",
        "diffusers + torch.compile of each block",
    ]


def test_nothing_to_fit():
    assert plots.draw_scaling([]) == {}
    assert plots.exponent_table(with_run(scaling(8_000, 1.0))) == ""


def texts(drawing):
    return [element.text for element in ET.fromstring(drawing).iter() if element.tag.endswith("text")]


def test_drawings_are_well_formed_and_escape_their_words():
    drawing = plots.draw_bars("a < b", [plots.Bar("x & y", 1.0, 0.5, 2.0)])
    assert {"a < b", "x & y", "1.00 s"} <= set(texts(drawing))
    ET.fromstring(plots.draw_bars("nothing", []))
    assert "forward 832x480x81 comfy-tpu" in texts(draw_run(make_run(*PEERS)))


def test_the_same_figures_make_the_same_drawing():
    first, second = (draw_run(make_run(*PEERS)) for _ in range(2))
    assert first == second
    assert "<dc:date>" not in first


def test_missing_libraries_are_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = f"need matplotlib and tabulate for their tables and plots; {re.escape(install_command('bench'))}"
    with pytest.raises(UnsupportedError, match=message):
        RunFiles.check()


def test_runs_on_a_mesh_have_a_chapter_of_their_own(tmp_path):
    one, eight = make_run(forward("ours", 2.0)), make_run(forward("ours", 0.5), mesh="dp=1,sp=8,tp=1")
    write_runs(tmp_path / "a.json", [one, eight])
    assert [run.mesh for run in read_runs(tmp_path / "a.json")] == ["single", "dp=1,sp=8,tp=1"]
    page = report.write_page([tmp_path / "a.json"], tmp_path / "page.md")[0].read_text()
    assert "## H200, Wan2.1-T2V-14B-Diffusers, bfloat16\n" in page
    assert "## H200, Wan2.1-T2V-14B-Diffusers, bfloat16, mesh dp=1,sp=8,tp=1\n" in page


def test_places_are_checked_before_anything_is_measured(tmp_path):
    with pytest.raises(InvalidValueError, match=r"plot=.*x\.png is written as SVG; give it a name in \.svg"):
        RunFiles.check(plot=tmp_path / "x.png")
    with pytest.raises(InvalidValueError, match="is a directory"):
        RunFiles.check(json=tmp_path)
    for field, path in (("json", "x.json"), ("markdown", "x.md"), ("plot", "x.svg")):
        with pytest.raises(InvalidValueError, match=f"^{field}=.*{path} is in .*such, and there is no .*; create it"):
            RunFiles.check(**{field: tmp_path / "no" / "such" / path})
    assert not list(tmp_path.iterdir())


def test_a_file_of_results_gets_one_more_run(tmp_path):
    path = tmp_path / "results.json"
    write_runs(path, [make_run(*CEILINGS)])
    files = RunFiles.check(json=path, markdown=tmp_path / "x.md", plot=tmp_path / "x.svg")
    run = make_run(*PEERS)
    files.keep(make_run())
    files.keep(run)
    files.finish(run)
    assert read_runs(path) == [make_run(*CEILINGS), run]
    assert "comfy-tpu" in (tmp_path / "x.md").read_text()
    ET.parse(tmp_path / "x.svg")


@only_with_the_pinned(PLOTTED)
def test_the_page_in_the_documents_is_what_the_results_make(tmp_path):
    files = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    for path in report.write_page(files, tmp_path / "performance.md", LANGUAGES):
        there = ROOT / "docs" / path.name
        assert there.is_file(), f"{path.name} is missing; run `make performance`"
        assert there.read_text() == path.read_text(), f"{path.name} is stale; run `make performance`"
