"""How many rows a model runs for a batch, and what is added to its arguments. Needs no ComfyUI."""

from typing import Any

import pytest
import torch

from comfy_tpu.comfy.native.batch_padding import MAX_WORK, describe_rows, has_independent_rows, pad_rows
from comfy_tpu.comfy.native.compiled_sizes import CompiledSizes


class Runner:
    """Counts programs for a sequence of batches, in which a compilation takes 30 s and a row one second."""

    def __init__(self) -> None:
        self.sizes = CompiledSizes()
        self.compiled: list[int] = []
        self.seconds = 0.0

    def run(self, rows: int) -> int:
        size = self.sizes.choose("call", (rows,), MAX_WORK)[0]
        build = 0.0 if size in self.compiled else 30.0
        if build:
            self.compiled.append(size)
        self.sizes.record("call", (rows,), (size,), build + size, build)
        self.seconds += build + size
        return size


def test_a_smaller_batch_runs_in_the_program_of_a_larger_one() -> None:
    runner = Runner()
    assert [runner.run(rows) for rows in (2, 1, 3, 2)] == [2, 2, 3, 2]
    assert runner.compiled == [2, 3]


def test_a_batch_is_at_most_doubled() -> None:
    runner = Runner()
    assert [runner.run(rows) for rows in (5, 2, 4, 1)] == [5, 2, 5, 2]


def test_the_smallest_program_is_used() -> None:
    runner = Runner()
    assert [runner.run(rows) for rows in (4, 8, 3)] == [4, 8, 4]


def test_waste_is_never_more_than_a_compilation() -> None:
    """A session that goes on with the smaller batch gets its program."""
    runner = Runner()
    runner.run(2)
    sizes = [runner.run(1) for _ in range(40)]
    assert sizes == [2] * 30 + [1] * 10
    assert runner.compiled == [2, 1]


def test_calls_of_another_kind_have_nothing_to_do_with_each_other() -> None:
    sizes = CompiledSizes()
    sizes.record("one", (2,), (2,), 31.0, 30.0)
    assert sizes.choose("other", (1,)) == (1,)


def test_a_tile_fits_where_both_sides_fit() -> None:
    sizes = CompiledSizes()
    for size in ((64, 64), (32, 128), (128, 32)):
        sizes.record("tile", size, size, 31.0, 30.0)
    assert sizes.choose("tile", (16, 100)) == (32, 128)
    assert sizes.choose("tile", (40, 40)) == (64, 64)
    assert sizes.choose("tile", (100, 100)) == (100, 100)


def test_rows_are_added_and_what_is_shared_stays() -> None:
    x, shared = torch.arange(6.0).view(3, 2), torch.ones(1, 4)
    padded = pad_rows({"x": x, "control": {"output": [shared, None]}, "strength": 0.5}, 3, 5)
    assert torch.equal(padded["x"], torch.cat([x, x[2:], x[2:]]))
    assert padded["control"]["output"] == [shared, None]
    assert padded["strength"] == 0.5


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ((torch.ones(2, 3),), (torch.ones(1, 3),), True),
        ((torch.ones(2, 3),), (torch.ones(1, 4),), False),
        ((torch.ones(2, 3),), (torch.ones(1, 3).half(),), False),
        ((torch.ones(2, 3), None), (torch.ones(1, 3), torch.ones(1)), False),
        ((torch.ones(2, 3), 1), (torch.ones(1, 3), 1.0), False),
    ],
)
def test_signatures(one: Any, other: Any, same: bool) -> None:
    assert (describe_rows(one, 2) == describe_rows(other, 1)) is same


@pytest.mark.parametrize("odd", [torch.ones(3, 2), torch.tensor(1.0), object()], ids=["rows", "scalar", "object"])
def test_arguments_that_are_not_understood_are_not_padded(odd: Any) -> None:
    assert describe_rows({"x": torch.ones(2, 3), "odd": odd}, 2) is None


class WanModel:
    pass


class UNetModel:
    default_num_video_frames = 14


class Unknown:
    pass


def test_only_models_whose_rows_are_known_to_be_independent() -> None:
    arguments = {"x": torch.ones(1), "timestep": torch.ones(1), "context": None, "scale": 2.0}
    assert has_independent_rows(WanModel(), arguments)
    assert not has_independent_rows(WanModel(), {**arguments, "vace_context": torch.ones(1)})
    assert not has_independent_rows(UNetModel(), arguments)
    assert not has_independent_rows(Unknown(), arguments)
