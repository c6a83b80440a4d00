"""Equal blocks of a module that nobody described: found, scanned where that is the same, and right where it is not."""

import jax
import pytest
import torch

from comfy_tpu.bridge import weight_shapes
from comfy_tpu.compiler import uniform
from comfy_tpu.compiler.hosted import HostedModule, _flatten_args
from comfy_tpu.compiler.residency import Residency
from comfy_tpu.compiler.uniform import BlockRun, UniformList, stack_uniform
from comfy_tpu.config import AttentionConfig, ResidencyConfig
from comfy_tpu.parallel.mesh import make_placement
from tests.tracing import relative_error

WIDTH = 8


class Block(torch.nn.Module):
    def __init__(self, scale: float = 1.0, hidden: int = 16):
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, hidden)
        self.down = torch.nn.Linear(hidden, WIDTH)
        self.scale = scale

    def forward(self, x, shift=None, options=None):
        out = x + self.scale * self.down(torch.tanh(self.up(x)))
        return out if shift is None else out + shift


class Model(torch.nn.Module):
    """Its loop is given by each test."""

    def __init__(self, blocks: list[torch.nn.Module], loop):
        super().__init__()
        self.blocks = torch.nn.ModuleList(blocks)
        self.loop = loop

    def forward(self, x):
        return self.loop(self, x)


def four() -> list[torch.nn.Module]:
    return [Block() for _ in range(4)]


def forward(module, x):
    return type(module).forward(module, x)


def hosted(module, mesh="single", **options):
    return HostedModule(
        module,
        name="model",
        placement=make_placement(mesh),
        dtype=torch.float32,
        attention=AttentionConfig(),
        residency=Residency(ResidencyConfig()),
        **options,
    )


@pytest.fixture(autouse=True)
def pieces(monkeypatch):
    """How each run was cut in the last trace: (start, stop) of what was one scan, or one block by itself."""
    found: dict[str, list[tuple[int, int]]] = {}
    decide = uniform._LoopRecorder.segments

    def deciding(watch):
        segments = decide(watch)
        found[watch._run.path] = [(segment.start, segment.stop) for segment in segments]
        return segments

    monkeypatch.setattr(uniform._LoopRecorder, "segments", deciding)
    return found


def _leaves(results):
    return [results] if isinstance(results, torch.Tensor) else results


def check(model: torch.nn.Module, mesh: str = "single"):
    """The same as torch, twice."""
    torch.manual_seed(0)
    model.requires_grad_(False)
    for weight in model.parameters():
        weight.normal_(0, 0.4)
    host = hosted(model, mesh)
    for _ in range(2):
        x = torch.randn(2, 5, WIDTH)
        before = x.clone()
        expected, got = model(x.clone()), host(forward, x)
        assert torch.equal(x, before), "an argument was written to"
        for one, other in zip(_leaves(expected), _leaves(got), strict=True):
            assert relative_error(other, one) <= 1e-5
    assert host.compiled_count == 1


def plain_loop(model, x):
    for block in model.blocks:
        x = block(x)
    return x


@pytest.mark.parametrize("mesh", ["single", "auto", "seed"])
def test_a_plain_loop_is_one_scan(mesh: str, pieces):
    check(Model(four(), plain_loop), mesh)
    assert pieces == {"blocks.0:4": [(0, 4)]}


def test_a_scanned_block_is_traced_a_fixed_number_of_times():
    calls = []

    class Counting(Block):
        def forward(self, x, shift=None, options=None):
            calls.append(1)
            return super().forward(x, shift, options)

    def traced(count: int) -> int:
        model = Model([Counting() for _ in range(count)], plain_loop).requires_grad_(False)
        host = hosted(model)
        calls.clear()
        host(forward, torch.randn(1, 2, WIDTH))
        return len(calls)

    assert traced(3) == traced(9)


def test_a_loop_over_indices(pieces):
    def loop(model, x):
        for index in range(len(model.blocks)):
            x = model.blocks[index](x, shift=0.1)
        return x

    check(Model(four(), loop))
    assert pieces == {"blocks.0:4": [(0, 4)]}


def test_slices_and_negative_indices(pieces):
    def loop(model, x):
        for block in model.blocks[:-1]:
            x = block(x)
        return model.blocks[-1](x) * 2

    check(Model(four(), loop))
    assert pieces == {"blocks.0:4": [(0, 4)]}


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ([Block(hidden=4), Block(), Block(), Block()], {"blocks.1:4": [(0, 3)]}),
        ([Block(), Block(), Block(), Block(hidden=4)], {"blocks.0:3": [(0, 3)]}),
        ([Block(), Block(), Block(2.0), Block(2.0)], {"blocks.0:2": [(0, 2)], "blocks.2:4": [(0, 2)]}),
        ([Block(), Block(hidden=4), Block(), Block(hidden=4)], {}),
        ([Block(1.0), Block(2.0), Block(3.0)], {}),
        ([Block()], {}),
    ],
    ids=["first differs", "last differs", "two kinds", "alternating", "an attribute differs", "one block"],
)
def test_runs_of_equal_blocks(blocks, expected, pieces):
    check(Model(blocks, plain_loop))
    assert pieces == expected


def test_an_intermediate_result_that_is_used_later_cuts_the_run(pieces):
    """As clip skip does."""

    def loop(model, x):
        kept = None
        for index, block in enumerate(model.blocks):
            x = block(x)
            if index == 2:
                kept = x
        return x, kept * 2

    check(Model([Block() for _ in range(6)], loop))
    assert pieces == {"blocks.0:6": [(0, 3), (3, 6)]}


def test_intermediate_results_that_are_returned(pieces):
    def loop(model, x):
        kept = []
        for block in model.blocks:
            x = block(x)
            kept.append(x)
        return kept

    check(Model(four(), loop))
    assert pieces == {"blocks.0:4": [(0, 1), (1, 2), (2, 3), (3, 4)]}


@pytest.mark.parametrize("look", [lambda x: x.mT, lambda x: x[:, :2], lambda x: x.view(-1), lambda x: x.data])
def test_a_view_of_an_intermediate_result_is_a_use_of_it(look, pieces):
    def loop(model, x):
        views = []
        for block in model.blocks:
            x = block(x)
            views.append(look(x))
        return [x, *(view + 1 for view in views)]

    check(Model(four(), loop))
    assert pieces == {"blocks.0:4": [(0, 1), (1, 2), (2, 3), (3, 4)]}


def test_looking_at_a_shape_is_no_use(pieces):
    def loop(model, x):
        for block in model.blocks:
            x = block(x)
            assert x.shape[1] == 5
            assert x.ndim == 3
            assert x.dtype == torch.float32
        return x

    check(Model(four(), loop))
    assert pieces == {"blocks.0:4": [(0, 4)]}


def test_something_between_two_blocks(pieces):
    def loop(model, x):
        for index, block in enumerate(model.blocks):
            x = block(x)
            if index == 1:
                x = x * 2
        return x

    check(Model(four(), loop))
    assert pieces == {"blocks.0:4": [(0, 2), (2, 4)]}


def test_a_result_that_is_written_to_between_blocks(pieces):
    def loop(model, x):
        for block in model.blocks:
            x = block(x)
            x[:, 0] += 1
        return x

    check(Model(four(), loop))
    assert pieces == {"blocks.0:4": [(0, 1), (1, 2), (2, 3), (3, 4)]}


def test_an_argument_that_differs_from_block_to_block(pieces):
    def loop(model, x):
        for index, block in enumerate(model.blocks):
            x = block(x, shift=float(index))
        return x

    check(Model(four(), loop))
    assert pieces == {"blocks.0:4": [(0, 1), (1, 2), (2, 3), (3, 4)]}


def test_a_tensor_argument_that_differs_from_block_to_block(pieces):
    def loop(model, x):
        shifts = x.mean(1, keepdim=True) * torch.arange(4, device=x.device)[:, None, None, None]
        for block, shift in zip(model.blocks, shifts, strict=True):
            x = block(x, shift)
        return x

    check(Model(four(), loop))
    assert len(pieces["blocks.0:4"]) == 4


def test_an_option_that_changes_inside_one_dictionary():
    """ComfyUI's models write the number of the block into a dictionary that all blocks get."""

    class Reads(Block):
        def forward(self, x, shift=None, options=None):
            return super().forward(x, shift) * (1 + options["index"])

    def loop(model, x):
        options = {}
        for index, block in enumerate(model.blocks):
            options["index"] = index
            x = block(x, options=options)
        return x

    check(Model([Reads() for _ in range(4)], loop))


def test_a_dictionary_entry_that_no_block_reads_may_vary(pieces):
    def run(module, x):
        options = {"same": {"value": [1, 2]}}
        for index, block in enumerate(module.blocks):
            options["index"] = index
            x = block(x, options=options)
        return x

    model, x = Model(four(), plain_loop).requires_grad_(False), torch.randn(1, 3, WIDTH)
    for varying, expected in ((frozenset({"index"}), 1), (frozenset({"other"}), 4)):
        host = hosted(model, varying=varying)
        assert relative_error(host(run, x), run(model, x)) <= 1e-5
        assert len(pieces["blocks.0:4"]) == expected


def test_an_input_that_blocks_write_into_and_others_see(pieces):
    class Writes(Block):
        def forward(self, x, shift=None, options=None):
            x += 0.5
            return super().forward(x)

    def loop(model, x):
        first = x
        for block in model.blocks:
            x = block(x)
        return x, first * 2

    check(Model([Writes() for _ in range(4)], loop))
    assert len(pieces["blocks.0:4"]) == 4


def test_an_input_that_blocks_write_into(pieces):
    class Writes(Block):
        def forward(self, x, shift=None, options=None):
            x += 0.5
            return super().forward(x)

    check(Model([Writes() for _ in range(4)], plain_loop))
    assert pieces == {"blocks.0:4": [(0, 4)]}, "ComfyUI's Flux adds in place"


def test_a_shared_argument_that_blocks_write_into():
    class Counts(Block):
        def forward(self, x, shift=None, options=None):
            shift += 1
            return super().forward(x, shift)

    def loop(model, x):
        shift = x.mean(1, keepdim=True)
        for block in model.blocks:
            x = block(x, shift)
        return x, shift

    check(Model([Counts() for _ in range(4)], loop))


def test_a_shared_list_that_blocks_add_to():
    """A cache of keys and values, for instance."""

    class Adds(Block):
        def forward(self, x, shift=None, options=None):
            options["seen"].append(x.mean(1, keepdim=True))
            return super().forward(x, options["seen"][0])

    def loop(model, x):
        options = {"seen": []}
        for block in model.blocks:
            x = block(x, options=options)
        return [x, *options["seen"]]

    check(Model([Adds() for _ in range(4)], loop))


def test_lists_that_blocks_take_from_and_add_to():
    """HunyuanVideo's VAE goes through a video in parts, and each layer leaves something for its next part."""

    class Carries(Block):
        def forward(self, x, before, after):
            if before is not None:
                x = torch.cat([before.pop(0), x], 1)
            if after is not None:
                after.append(x[:, -1:])
            return super().forward(x)[:, -2:]

    def loop(model, x):
        before, results = None, []
        parts = x[:, :4].split(2, 1)
        for index, part in enumerate(parts):
            after = [] if index < len(parts) - 1 else None
            for block in model.blocks:
                part = block(part, before, after)
            results.append(part)
            before = after
        return torch.cat(results, 1)

    check(Model([Carries() for _ in range(3)], loop))


def test_a_model_that_writes_into_its_input(pieces):
    def loop(model, x):
        x += 1
        return plain_loop(model, x)

    check(Model(four(), loop))
    assert pieces == {"blocks.0:4": [(0, 4)]}


def test_two_streams(pieces):
    class Double(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, image, text, vector):
            mean = text.mean(1, keepdim=True)
            return torch.tanh(self.one(image) + mean), torch.tanh(self.two(text)) + vector

    def loop(model, x):
        image, text, vector = x, x[:, :3], x[:, :1]
        for block in model.blocks:
            image, text = block(image, text=text, vector=vector)
        return image, text

    check(Model([Double() for _ in range(3)], loop))
    assert pieces == {"blocks.0:3": [(0, 3)]}


def test_blocks_that_pass_their_arguments_on(pieces):
    """As SD3's do: their own signature says nothing."""

    class Mixed(Block):
        def forward(self, *args, **kwargs):
            return self.mix(*args, **kwargs)

        def mix(self, text, image, *, vector):
            return super().forward(text + image.mean(1, keepdim=True)), torch.tanh(self.down(self.up(image))) + vector

    def loop(model, x):
        text, image = x[:, :2], x
        for block in model.blocks:
            text, image = block(text, image, vector=0.5)
        return text, image

    check(Model([Mixed() for _ in range(4)], loop))
    assert pieces == {"blocks.0:4": [(0, 4)]}


def test_streams_that_are_swapped_between_blocks():
    class Double(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one = torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, a, b):
            return self.one(a) + b, b * 2

    def loop(model, x):
        a, b = x, x + 1
        for index, block in enumerate(model.blocks):
            a, b = block(a, b) if index % 2 else block(b, a)
        return a, b

    check(Model([Double() for _ in range(4)], loop))


def test_blocks_called_twice_or_backwards_or_in_part():
    def twice(model, x):
        return plain_loop(model, plain_loop(model, x))

    def backwards(model, x):
        for index in reversed(range(len(model.blocks))):
            x = model.blocks[index](x)
        return x

    def part(model, x):
        for block in model.blocks[1:3]:
            x = block(x)
        return x

    for loop in (twice, backwards, part):
        check(Model(four(), loop))


def test_the_same_result_goes_into_every_block(pieces):
    def loop(model, x):
        return sum(block(x) for block in model.blocks)

    check(Model(four(), loop))
    assert len(pieces["blocks.0:4"]) == 4


def test_a_block_that_changes_the_size_is_not_scanned():
    class Grows(Block):
        def forward(self, x, shift=None, options=None):
            return torch.cat([super().forward(x), x[:, :1]], 1)

    check(Model([Grows() for _ in range(3)], plain_loop))


def test_a_block_whose_parts_are_used_by_themselves_is_not_stacked(pieces):
    def loop(model, x):
        for block in model.blocks:
            x = x + block.scale * block.down(torch.sin(block.up(x)))
        return x

    check(Model(four(), loop))
    assert pieces == {}


def test_a_block_that_is_taken_for_a_list_is_not_stacked(pieces):
    """ComfyUI's U-Net goes through the layers of each of its blocks, and asks for their classes."""

    class Layers(torch.nn.Sequential):
        pass

    def loop(model, x):
        for block in model.blocks:
            for layer in block:
                x = torch.tanh(layer(x)) if isinstance(layer, torch.nn.Linear) else x
        return x

    check(Model([Layers(torch.nn.Linear(WIDTH, WIDTH)) for _ in range(3)], loop))
    assert pieces == {}


def test_a_block_with_an_order_of_its_own_is_not_stacked():
    class Layers(Block):
        def __iter__(self):
            return iter((self.up, torch.tanh, self.down))

        def __len__(self):
            return 3

        def __getitem__(self, index):
            return list(self)[index]

    def by_iteration(model, x):
        for block in model.blocks:
            for layer in block:
                x = layer(x)
        return x

    def by_index(model, x):
        for block in model.blocks:
            for index in range(len(block)):
                x = block[index](x)
        return x

    for loop in (by_iteration, by_index):
        check(Model([Layers() for _ in range(3)], loop))


def test_a_block_that_is_asked_for_its_class_is_not_stacked():
    def loop(model, x):
        for block in model.blocks:
            if isinstance(block, Block):
                x = block(x)
        return x

    check(Model(four(), loop))


def test_lists_in_lists_and_lists_of_lists(pieces):
    class Group(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(four())

        def forward(self, x):
            return plain_loop(self, x)

    check(Model([Group(), Group()], plain_loop))
    assert pieces == {"blocks.0:2": [(0, 2)]}
    pieces.clear()
    # A list that nothing stacks is looked into.
    check(Model([Group(), Block()], plain_loop))
    assert pieces == {"blocks.0.blocks.0:4": [(0, 4)]}
    pieces.clear()
    # A list of lists is never called, so that its lists are looked into.
    outer = torch.nn.ModuleList([torch.nn.ModuleList(four()), torch.nn.ModuleList(four())])

    def loop(model, x):
        for blocks in model.blocks:
            for block in blocks:
                x = block(x)
        return x

    check(Model(list(outer), loop))
    assert pieces == {"blocks.0.0:4": [(0, 4)], "blocks.1.0:4": [(0, 4)]}


def test_what_another_call_does_is_decided_anew():
    def run(module, x, keep):
        kept = []
        for block in module.blocks:
            x = block(x)
            kept.append(x)
        return kept if keep else x

    model = Model(four(), plain_loop).requires_grad_(False)
    host, x = hosted(model), torch.randn(1, 3, WIDTH)
    for keep in (False, True, False):
        expected, got = run(model, x, keep), host(run, x, keep)
        for one, other in zip(expected if keep else [expected], got if keep else [got], strict=True):
            assert relative_error(other, one) <= 1e-5


def test_names_of_stacked_weights_stay_those_of_the_blocks():
    module = stack_uniform(Model([Block(hidden=4), *four()], plain_loop))
    assert isinstance(module.blocks, UniformList)
    assert len(module.blocks) == 5
    assert [run.block_names("") for run in module.modules() if isinstance(run, BlockRun)] == [
        ("blocks.1", "blocks.2", "blocks.3", "blocks.4")
    ]
    assert "blocks.0.up.weight" in weight_shapes(module)


def test_a_scan_is_what_is_compiled():
    def lowered(count: int) -> str:
        model = Model([Block() for _ in range(count)], plain_loop).requires_grad_(False)
        host = hosted(model)
        with host._weights() as (_, weights):
            program = host._program(forward, ("dp",))
            tensors, structure = _flatten_args(((torch.randn(1, 3, WIDTH),), {}))
            return program.lower(weights, tensors=tensors, structure=structure).as_text()

    assert "stablehlo.while" in lowered(4)
    assert len(lowered(4).splitlines()) == len(lowered(12).splitlines())


def test_random_numbers_of_the_host_are_untouched():
    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    model = Model(four(), plain_loop).requires_grad_(False)
    host = hosted(model)
    state = torch.get_rng_state()
    host(forward, torch.ones(1, 2, WIDTH))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    assert torch.equal(torch.randn(3), expected)
    assert jax.config.jax_enable_x64 is False
