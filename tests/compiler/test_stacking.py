"""Scan over layers: the same result as the loop, and a loud refusal where blocks are not equal."""

import jax
import pytest
import torch

from comfy_tpu.bridge import TraceContext, build_skeleton, call_module, to_device, to_host, weight_shapes
from comfy_tpu.compiler.stacking import LayerStack, split_layer_name, stack_layers, stacked_blocks
from comfy_tpu.errors import StackingError
from tests.tracing import relative_error


class Block(torch.nn.Module):
    """Carries two streams, in the other order out than in, as Flux does; has a computed buffer and a tied weight."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.image = torch.nn.Linear(6, 6)
        self.text = torch.nn.Linear(6, 6)
        self.tied = self.text
        self.register_buffer("table", torch.arange(6.0), persistent=False)
        self.register_buffer("scale", torch.full((6,), 0.5))

    def forward(self, image, text, shift=None):  # type: ignore[no-untyped-def]
        shared = image.mean(1, keepdim=True) + self.table
        return self.tied(text) + shared * self.scale, self.image(image) + shift, None


class Model(torch.nn.Module):
    def __init__(self, blocks: list[torch.nn.Module]) -> None:
        super().__init__()
        self.inner = torch.nn.Module()
        self.inner.blocks = torch.nn.ModuleList(blocks)

    def forward(self, image, text):  # type: ignore[no-untyped-def]
        for block in self.inner.blocks:
            text, image, nothing = block(image, text=text, shift=0.1)
            assert nothing is None
        return image, text


STACK = LayerStack("inner.blocks", carry=("text", "image"))


def run(skeleton: torch.nn.Module, source: torch.nn.Module, *inputs: torch.Tensor):  # type: ignore[no-untyped-def]
    counts, state = stacked_blocks(skeleton), source.state_dict()
    weights = {}
    for name in weight_shapes(skeleton):
        sources = split_layer_name(name, counts)
        stacked = sources != (name,)
        weights[name] = torch.stack([state[part] for part in sources]) if stacked else state[name]
    call = jax.jit(lambda w, x: call_module(skeleton, w, x, context=TraceContext()))
    return call, to_host(call(to_device(weights), to_device(inputs)))


@pytest.mark.parametrize("layers", [1, 4])
def test_scan_equals_loop(layers: int) -> None:
    torch.manual_seed(0)
    reference = Model([Block(index) for index in range(layers)]).requires_grad_(False)
    inputs = torch.randn(2, 3, 6), torch.randn(2, 5, 6)
    expected = reference(*inputs)
    skeleton = stack_layers(build_skeleton(lambda: Model([Block(index) for index in range(layers)])), (STACK,))
    assert set(weight_shapes(skeleton)) == {
        f"inner.blocks.*.{name}" for name in ("image.weight", "image.bias", "text.weight", "text.bias", "scale")
    }
    _, actual = run(skeleton, reference, *inputs)
    for one, other in zip(actual, expected, strict=True):
        assert relative_error(one, other) <= 1e-5


def test_a_block_is_traced_once_however_many_layers() -> None:
    calls = []

    class Counting(Block):
        def forward(self, image, text, shift=None):  # type: ignore[no-untyped-def]
            calls.append(self.layer_idx)
            return super().forward(image, text, shift)

    def build() -> torch.nn.Module:
        return Model([Counting(index) for index in range(20)])

    reference = build()
    run(stack_layers(build_skeleton(build), (STACK,)), reference, torch.randn(1, 3, 6), torch.randn(1, 5, 6))
    assert calls == [0]


def test_names_of_layers() -> None:
    counts = {"inner.blocks.*.": ("inner.blocks.0", "inner.blocks.1", "inner.blocks.2")}
    assert split_layer_name("inner.blocks.*.a.weight", counts) == tuple(f"inner.blocks.{i}.a.weight" for i in range(3))
    assert split_layer_name("inner.head.weight", counts) == ("inner.head.weight",)


def wider(blocks: list[torch.nn.Module]) -> None:
    blocks[2].image = torch.nn.Linear(6, 7)


def with_bias_missing(blocks: list[torch.nn.Module]) -> None:
    blocks[1].text.bias = None


def of_another_class(blocks: list[torch.nn.Module]) -> None:
    blocks[1].text = torch.nn.Identity()


def with_another_setting(blocks: list[torch.nn.Module]) -> None:
    for index, block in enumerate(blocks):
        block.window = 7 + (index == 2)


def with_another_table(blocks: list[torch.nn.Module]) -> None:
    blocks[1].table = torch.arange(6.0) * 2


def with_another_processor(blocks: list[torch.nn.Module]) -> None:
    class Processor:
        def __init__(self, gain: float) -> None:
            self.gain = gain

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.gain

    for index, block in enumerate(blocks):
        block.processor = Processor(1.0 + index)


def with_another_list(blocks: list[torch.nn.Module]) -> None:
    for index, block in enumerate(blocks):
        block.sizes = [1, {"inner": index // 2}]


def with_another_function(blocks: list[torch.nn.Module]) -> None:
    for block, function in zip(blocks, (torch.relu, torch.relu, torch.sigmoid), strict=True):
        block.activation = function


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (with_another_table, r"inner.blocks\[1\] differs .* in table"),
        (with_another_processor, r"inner.blocks\[1\] differs .* in processor"),
        (with_another_list, r"inner.blocks\[2\] differs .* in sizes"),
        (with_another_function, r"inner.blocks\[2\] differs .* in activation"),
        (
            wider,
            r"inner.blocks\[2\] differs from inner.blocks\[0\] in image.*leave the list out of the family's stacks",
        ),
        (with_bias_missing, r"inner.blocks\[1\] differs .*text.bias"),
        (of_another_class, r"inner.blocks\[1\] differs from"),
        (with_another_setting, r"inner.blocks\[2\] differs .* in window \(7 there, 8 here\).*`varying`"),
    ],
)
def test_unequal_blocks_are_refused(spoil, text: str) -> None:  # type: ignore[no-untyped-def]
    blocks: list[torch.nn.Module] = [Block(index) for index in range(3)]
    spoil(blocks)
    with pytest.raises(StackingError, match=text):
        stack_layers(Model(blocks), (STACK,))


def test_a_path_that_is_not_there_is_refused() -> None:
    with pytest.raises(StackingError, match="Model has no outer.blocks"):
        stack_layers(Model([Block(0)]), (LayerStack("outer.blocks"),))


@pytest.mark.parametrize("path", ["inner", "inner.missing"])
def test_a_path_without_a_list_is_refused(path: str) -> None:
    with pytest.raises(StackingError, match=rf"{path} of Model is \w+, expected a ModuleList"):
        stack_layers(Model([Block(0)]), (LayerStack(path),))


def test_a_wrong_carry_is_refused() -> None:
    skeleton = stack_layers(build_skeleton(lambda: Model([Block(0), Block(1)])), (LayerStack("inner.blocks"),))
    with pytest.raises(
        StackingError, match="said to carry 'hidden_states', but its blocks were called with image, text, shift"
    ):
        run(skeleton, Model([Block(0), Block(1)]), torch.randn(1, 3, 6), torch.randn(1, 5, 6))


def test_a_block_that_changes_dtype_is_refused() -> None:
    class Widening(torch.nn.Module):
        def forward(self, hidden_states):  # type: ignore[no-untyped-def]
            return hidden_states.float()

    class Chain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList([Widening(), Widening()])

        def forward(self, x):  # type: ignore[no-untyped-def]
            for block in self.blocks:
                x = block(x)
            return x

    skeleton = stack_layers(build_skeleton(Chain), (LayerStack("blocks"),))
    with pytest.raises(StackingError, match=r"turns hidden_states from bfloat16\[2\] into float32\[2\].*cast before"):
        run(skeleton, Chain(), torch.ones(2, dtype=torch.bfloat16))


def test_taking_a_part_of_a_scanned_list_is_refused() -> None:
    skeleton = stack_layers(build_skeleton(lambda: Model([Block(0), Block(1)])), (STACK,))
    layers = skeleton.get_submodule("inner.blocks")
    assert layers[:2] is layers  # type: ignore[index]
    assert len(layers) == 2  # type: ignore[arg-type]
    assert layers[1].image.in_features == 6  # type: ignore[index]
    with pytest.raises(StackingError, match=r"calls a single layer of inner.blocks, which runs as a scan"):
        layers[1](torch.ones(1))  # type: ignore[index]
    with pytest.raises(IndexError):
        layers[2]  # type: ignore[index]
    with pytest.raises(StackingError, match=r"takes inner.blocks\[1:None:None\] of 2 scanned layers"):
        layers[1:]  # type: ignore[index]
