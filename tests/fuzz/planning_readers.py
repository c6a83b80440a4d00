"""Readers of compilers' texts, exported programs, stored programs and results of benchmarks."""

from __future__ import annotations

import contextlib
import functools
import io
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from hypothesis import strategies as st

from comfy_tpu.bench.report import write_page
from comfy_tpu.compiler.cache import _is_damaged
from comfy_tpu.compiler.stored.entries import Entries, _pack
from comfy_tpu.compiler.stored.store import ProgramStore
from comfy_tpu.config import MeshSizes
from comfy_tpu.errors import ComfyTpuError
from comfy_tpu.planning.hlo import Module, stablehlo_shapes
from comfy_tpu.planning.program_file import _FORMAT, read_program
from comfy_tpu.planning.schedule_files import parse_schedule, read_schedules
from tests.fuzz.hostile_bytes import changed_bytes, changed_value, documents, dump, files
from tests.fuzz.model_readers import write
from tests.fuzz.reader import Case, named, reader

SAMPLES = Path(__file__).parents[1] / "planning"
_NUMBERS = ("0", "1", "-1", "4294967296", "99999999999999999999", "", "x")


@functools.cache
def _lines(name: str) -> tuple[str, ...]:
    return tuple((SAMPLES / name).read_text(encoding="utf-8").splitlines())


@st.composite
def _changed_text(draw: st.DrawFn, name: str) -> bytes:
    """A compiler's text with lines removed, repeated, moved and cut, and other numbers and names in them."""
    lines = list(_lines(name))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(lines) - 1))
        kind = draw(st.sampled_from(("remove", "repeat", "move", "cut", "number", "name", "characters")))
        if kind == "remove":
            del lines[at]
        elif kind == "repeat":
            lines[at:at] = [lines[at]] * draw(st.sampled_from((1, 3)))
        elif kind == "move":
            lines.insert(draw(st.integers(0, len(lines))), lines.pop(at))
        elif kind == "cut":
            lines[at] = lines[at][: draw(st.integers(0, len(lines[at])))]
        elif kind == "characters":
            lines[at] = draw(changed_bytes(lines[at].encode())).decode("utf-8", "replace")
        else:
            words = lines[at].replace("=", " = ").split(" ")
            spots = [
                n for n, word in enumerate(words) if any(map(str.isdigit if kind == "number" else str.isalpha, word))
            ]
            if spots:
                spot = draw(st.sampled_from(spots))
                other = lines[draw(st.integers(0, len(lines) - 1))].split(" ")
                words[spot] = draw(st.sampled_from(_NUMBERS if kind == "number" else other))
                lines[at] = " ".join(words)
        if not lines:
            break
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _programs() -> st.SearchStrategy[Case]:
    return st.sampled_from(("printed_program.hlo", "scheduled_program.hlo")).flatmap(
        lambda name: named("program.hlo", _changed_text(name))
    )


@reader("planning.hlo", "planning.compilation", cases=_programs, share=0.5)
def read_hlo(directory: Path, _: Any, case: Case) -> None:
    text = case.content.decode("utf-8", "replace")
    module = Module(text)
    stablehlo_shapes(text)
    for look in (
        lambda: [each.axes(MeshSizes(2, 2, 2)) for each in module.collectives()],
        module.product_flops,
        module.convolution_flops,
        module.kernel_flops,
        module.kernels,
        module.shapes,
        lambda: module.in_loop,
    ):
        with contextlib.suppress(ComfyTpuError):
            look()


LISTING = "schedule_sample/1-pad.1-02-final_bundles.txt"
SLOTS = "schedule_sample/1-pad.1-00-final_hlo-static-per-bundle-utilization.txt"


def _schedules() -> st.SearchStrategy[Case]:
    return st.sampled_from((LISTING, SLOTS)).flatmap(lambda name: named(name, _changed_text(name)))


@reader("planning.schedule_files", "planning.schedule", cases=_schedules)
def read_schedule(directory: Path, _: Any, case: Case) -> None:
    given = {name: "\n".join(_lines(name)) for name in (LISTING, SLOTS)}
    given[case.name] = case.content.decode("utf-8", "replace")
    schedule = parse_schedule("pad.1", given[LISTING], given[SLOTS])
    assert schedule.bound
    assert schedule.shares
    assert schedule.body is None or schedule.body.bound


@reader("planning.schedule_files", cases=lambda: named("1-x-01-final_bundles.txt", files(b"0x1 : { x }", b"\xff\xfe")))
def read_schedule_directory(directory: Path, _: Any, case: Case) -> None:
    write(directory, case)
    write(directory, case, "1-x-01-final_hlo-static-per-bundle-utilization.txt")
    read_schedules(directory)


@functools.cache
def _exported() -> bytes:
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    return bytes(jax.export.export(jax.jit(lambda x: x + 1), platforms=["tpu"])(shape).serialize())


_GROUP = {"tensors": 1, "nbytes": 16, "bytes_per_device": 16}
_SIZES = {"dp": 1, "sp": 1, "tp": 1}
FACTS: dict[str, Any] = {
    "format": _FORMAT,
    "model": "demo",
    "size": "64x64x17",
    "sizes": _SIZES,
    "slice_name": "v6e-1",
    "weight_shapes": [[2, 2]],
    "square_arrays": [],
    "resident_bytes": 16,
    "argument_bytes": 16,
    "kernels": 0,
    "work": {
        "batch": 2,
        "tokens": 64,
        "text_tokens": 8,
        "text": "keys",
        "heads": 2,
        "head_dim": 2,
        "ffn": 8,
        "stacks": [{"layers": 2, "matrices": []}],
        "outer": [],
        "small_bytes": 8,
        "output_features": 4,
        "latent_bytes": 64,
    },
    "sharding": {
        "sizes": _SIZES,
        "sharded": _GROUP,
        "gathered": _GROUP,
        "replicated": _GROUP,
        "could_not_split": [],
    },
}


def _zip(header: bytes, program: bytes) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("plan.json", header)
        archive.writestr("program.jax-export", program)
    return content.getvalue()


def _program_files() -> st.SearchStrategy[Case]:
    headers = documents(FACTS).map(lambda header: _zip(header, _exported()))
    damaged = files(_zip(dump(FACTS), _exported()))
    programs = files(_exported()).map(lambda program: _zip(dump(FACTS), program))
    return named("x.plan", st.one_of(headers, damaged, programs))


@reader("planning.program_file", cases=_program_files)
def read_exported_program(directory: Path, _: Any, case: Case) -> None:
    read_program(write(directory, case))


ENTRY = {
    "kind": "program",
    "program": {"name": "x", "inputs": []},
    "compiled": "jit_x-" + "0" * 64 + "-cache",
    "checksum": "ab",
    "about": {"what": "transformer"},
}
KEY = "x-" + "0" * 40


def _entry_files() -> st.SearchStrategy[Case]:
    whole = changed_value(ENTRY).filter(lambda entry: isinstance(entry, dict)).map(lambda entry: _pack(entry))
    return named(f"programs/{KEY}.entry", st.one_of(whole, files(_pack(ENTRY))))


def _make_store(directory: Path) -> ProgramStore:
    (directory / "programs").mkdir()
    (directory / ENTRY["compiled"]).write_bytes(b"damaged")
    return ProgramStore(directory, 10**9)


@reader("compiler.stored.entries", "compiler.stored.store", "compiler.cache", cases=_entry_files, prepare=_make_store)
def read_stored_program(directory: Path, store: ProgramStore, case: Case) -> None:
    """Nothing of a damaged entry is used, and it is made again."""
    write(directory, case)
    (directory / ENTRY["compiled"]).write_bytes(case.content)
    assert _is_damaged(directory / ENTRY["compiled"])
    assert store.load_program(KEY, None) is None
    for _ in Entries(directory / "programs").all():
        pass


RUN = {
    "date": "2026-11-16T00:00:00Z",
    "command": "comfy-tpu bench",
    "model": "small:wan",
    "dtype": "float32",
    "hardware": {
        "device": "cpu",
        "devices": 1,
        "platform": "cpu",
        "processor": "x",
        "processor_cores": 2,
        "host_memory_bytes": 2**34,
    },
    "versions": {"jax": "0.10.2", "torch": None},
    "mesh": "single",
    "rows": [
        {
            "part": "transformer",
            "what": "step",
            "peer": peer,
            "size": "64x64x17",
            "samples": [1.0, 1.1],
            "first_s": 2.0,
            "flops": 1e9,
            "error": 0.01,
            "facts": {"tokens": 64},
            "failure": None,
            "traceback": None,
        }
        for peer in ("ours", "diffusers")
    ],
}


def _write_good_page(directory: Path) -> None:
    """Also for what matplotlib makes in the user's folders when it is first used."""
    write_page([write(directory, Case(dump({"schema": 1, "runs": [RUN]}), "bench.json"))], directory / "page.md")


@reader(
    *("bench.results", "bench.report"),
    cases=lambda: named("bench.json", documents({"schema": 1, "runs": [RUN]})),
    prepare=_write_good_page,
    share=0.5,
)
def read_benchmark(directory: Path, _: Any, case: Case) -> None:
    write_page([write(directory, case)], directory / "page.md")
