"""Reading beyond one function: imports, other files of the package, what a call passes on."""

import pytest

from comfy_tpu.porting.check import read_source
from comfy_tpu.porting.targets import find_targets

MODEL = """
class Model(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return {body}
"""


@pytest.fixture
def found(tmp_path):
    def read(text, **others):
        for name, content in others.items():
            (tmp_path / f"{name}.py").write_text(content)
        (tmp_path / "model.py").write_text(text)
        (target,) = find_targets(f"{tmp_path / 'model.py'}:Model")
        return [(each.trap, each.file.rpartition("/")[2], each.line) for each in read_source(target)]

    return read


@pytest.mark.parametrize(
    ("imports", "is_trap"),
    [
        ("import flash_attn", True),
        ("from flash_attn.bert_padding import pad_input", True),
        ("import triton.language as tl", True),
        ("try:\n    import flash_attn\nexcept ImportError:\n    flash_attn = None", False),
        ("if has_flash_attention():\n    import flash_attn", False),
        ("from .flash_attn import mine", False),
        ("import flash_attn_of_ours", False),
    ],
)
def test_imports_at_the_top(found, imports, is_trap):
    places = found(f"{imports}\nimport torch\n" + MODEL.format(body="x"))
    assert places == ([("gpu-only-import", "model.py", 1)] if is_trap else [])


def test_a_function_of_another_file_is_followed(found):
    other = "import torch\n\ndef scaled(x, limit):\n    if limit:\n        return x\n    return x if x.sum() else -x\n"
    text = "import torch\nfrom other import scaled\n" + MODEL.format(body="scaled(x, 3)")
    assert found(text, other=other) == [("tensor-condition", "other.py", 6)]
    text = "import torch\nimport other as o\n" + MODEL.format(body="o.scaled(x, limit=x.mean())")
    assert found(text, other=other) == [("tensor-condition", "other.py", 4), ("tensor-condition", "other.py", 6)]


def test_what_a_call_leaves_out_is_its_default(found):
    other = (
        "import torch\n\ndef turned(x, real=True, table=None):\n"
        "    if not real:\n        return torch.view_as_complex(x)\n"
        "    if table is not None:\n        return x * x.item()\n    return x\n"
    )
    text = "import torch\nfrom other import turned\n" + MODEL
    assert found(text.format(body="turned(x)"), other=other) == []
    assert found(text.format(body="turned(x, False)"), other=other) == [("complex", "other.py", 5)]
    assert found(text.format(body="turned(x, table=x)"), other=other) == [("tensor-to-number", "other.py", 7)]


@pytest.mark.parametrize(("name", "is_trap"), [("frames", True), ("num_frames", False), ("chunk_partition", False)])
def test_arguments_that_nothing_describes_are_tensors_unless_their_names_say_otherwise(found, name, is_trap):
    text = "import torch\n" + MODEL.replace("x: torch.Tensor", f"x, {name}").format(body=f"x.view({name}, 2)")
    assert bool(found(text)) is is_trap


def test_a_function_that_nobody_calls_is_not_read(found):
    text = "import torch\n\ndef unused(x: torch.Tensor):\n    return x.item()\n" + MODEL.format(body="x")
    assert found(text) == []


def test_what_a_base_class_brings_is_read(found):
    base = "import torch\n\nclass Base(torch.nn.Module):\n    def norm(self, y):\n        return y / y.max().item()\n"
    text = f"{base}{MODEL.replace('torch.nn.Module', 'Base').format(body='self.norm(x)')}"
    assert found(text) == [("tensor-to-number", "model.py", 5)]


def test_a_function_that_calls_itself_ends(found):
    text = (
        "import torch\n\ndef deeper(x, seen):\n    return deeper(x, (seen, x)) if x.ndim else x.item()\n"
        + MODEL.format(body="deeper(x, ())")
    )
    assert found(text) == [("tensor-to-number", "model.py", 4)]


@pytest.mark.parametrize(
    ("body", "is_trap"),
    [
        ("x if x.sum() else -x", True),
        ("x if x.shape[0] else -x", False),
        ("x if self.training else x + 1", False),
        ("x[x > 0]", True),
        ("x[torch.tensor([True, False])]", False),
        ("x[(x > 0).nonzero()]", True),
        ("[y for y in x if y.sum() > 0][0]", True),
        ("[y for y in x if y.shape[0] > 0][0]", False),
        ("x * (lambda: 3)()", False),
        ("x * (lambda y: y.item())(x)", True),
        ("(lambda y: y if y.shape[0] else -y)(x)", False),
        ("x * len(f'{x.mean():.2f}')", True),
        ("x * len(f'{x.mean().item()}')", True),
        ("x * len(f'{x} {x.shape[0]:3d} {x!r:>9}')", False),
        ("x * np.asarray(x).size", True),
        ("x * np.array(3)", False),
        ("x if {'a': x, 'n': 3}['a'].sum() else -x", True),
        ("x if {'a': x, 'n': 3}['n'] > 2 else -x", False),
        ("x if {'a': x}.get('a').sum() else -x", True),
        ("x * int(x.shape[0])", False),
        ("x * max(x[0, 0], x[0, 1])", True),
        ("torch.where(x > 0, x, 0)", False),
        ("torch.where(x > 0)[0]", True),
        ("x.to('cuda')", False),
        ("x.view(x.sum(), 2)", True),
        ("x.view(*x.shape[:-1], 2)", False),
        ("x.cuda()", True),
        ("x * len([1, 2, 3][: x.sum().item()])", True),
        ("x[torch.unsqueeze(x > 0, 0)]", True),
        ("x[(x > 0).tril()]", True),
        ("x[torch.tensor([[x[0, 0] > 0]], dtype=torch.bool)]", True),
        ("x * len([(yield x.item())])", True),
    ],
)
def test_expressions(found, body, is_trap):
    text = "import numpy as np\nimport torch\n" + MODEL.replace("{body}", body)
    assert bool(found(text)) == is_trap


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ("match mode:\n    case 'a':\n        x = x * x.item()\n    case _:\n        x = -x\nreturn x", [3]),
        ("match x.sum():\n    case 0:\n        return x\nreturn -x", [1]),
        ("match x:\n    case torch.Tensor():\n        return x\nreturn -x", []),
        ("match mode:\n    case y if x.sum() > 0:\n        return x\nreturn x.item()", [2, 4]),
        ("match mode:\n    case 'a':\n        return x\n    case _:\n        return -x\nreturn x.item()", []),
        ("d = {'n': 2}\nd['x'] = x\nif d['n'] > 1:\n    x = -x\nreturn x if d['x'].sum() else -x", [5]),
        ("d = {'x': x}\nd.update(x=3)\nreturn x if d['x'] else -x", []),
        ("d = {'x': x}\nd[mode] = 3\nreturn x if d['x'] else -x", []),
        ("d = {'x': x}\nfor key in d:\n    if key:\n        x = -x\nreturn x", []),
    ],
)
def test_statements(found, body, lines):
    head = "import torch\nclass Model(torch.nn.Module):\n  def forward(self, x: torch.Tensor, mode: str):\n"
    places = found(head + "".join(f"    {line}\n" for line in body.splitlines()))
    assert [line - 3 for _, _, line in places] == lines
