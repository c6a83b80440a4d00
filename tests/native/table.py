"""The table of docs/native.md: a cell for each thing that was tried with each architecture, written by a test run."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from tests.comfyui.checkout import find_path

BEGIN, END = "<!-- written by `make native-table` -->", "<!-- end -->"
PROPERTY = "native_cell"
CHINESE = {
    "Nodes around the model": "模型周围的节点",
    "prompt": "提示词",
    "empty prompt": "空提示词",
    "weighted words": "加权词语",
    "long prompt": "长提示词",
    "long prompts": "长提示词",
    "8 devices": "8 个设备",
    "8 devices, auto": "8 个设备，auto",
    "8 devices, dp=2 × tp=4": "8 个设备，dp=2 × tp=4",
    "programs": "程序数",
    "programs at one size": "同一尺寸的程序数",
    "programs to decode": "解码所用程序数",
    "other negative length": "负面提示词长度不同",
    "batch 2": "批量 2",
    "second resolution": "第二种分辨率",
    "decode": "解码",
    "decode tiled": "分块解码",
    "encode": "编码",
    "encode tiled": "分块编码",
    "out of memory": "内存不足",
    "wrappers": "wrapper",
    "guidance functions": "guidance 函数",
    "areas": "区域条件",
    "noise mask": "噪声遮罩",
    "reference latents": "参考 latent",
    "masked text": "带 mask 的文本",
    "replaced block": "替换 block",
    "replaced attention": "替换注意力",
    "callable option": "可调用的选项",
    "patches of a U-Net": "U-Net 的补丁",
    "patches that read values": "读取数值的补丁",
    "patches with tensors": "带张量的补丁",
    "attention override": "注意力 override",
    "object patches": "object patch",
    "monkey patches": "monkey patch",
    "weight wrappers": "weight wrapper",
    "hooks": "hook",
    "tensor option": "张量选项",
    "prompts one by one": "提示词逐个计算",
    "injections": "injection",
    "context windows": "上下文窗口",
    "distilled (meanflow)": "蒸馏模型（meanflow）",
    "Wan 2.2 14B T2V, both models": "Wan 2.2 14B T2V，两个模型",
    "yes": "是",
}
"""Words of the tables; names of models, nodes and samplers stay."""
_CHINESE_STARTS = {"With ": "环境：", "**fails**: ": "**失败**：", "not tried: ": "未试："}
_WORST_FIRST = ("failed", "skipped", "passed")


class Cell:
    """Where the outcome of a test goes. Say it before anything can fail."""

    def __init__(self, properties: list[tuple[str, object]]) -> None:
        self._properties = properties
        self._place: dict[str, object] = {}

    def at(self, table: str, row: str, column: str) -> Cell:
        self._place = {"table": table, "row": row, "column": column, "values": []}
        self._properties.append((PROPERTY, self._place))
        return self

    def error(self, value: float) -> float:
        """The largest of them is shown."""
        self._values.append(value)
        return value

    def decibels(self, value: float) -> float:
        """The smallest of them is shown."""
        self._place["unit"] = "dB"
        return -self.error(-value)

    def count(self, value: int) -> int:
        self._place["unit"] = "programs"
        return int(self.error(value))

    @property
    def _values(self) -> list[float]:
        values = self._place["values"]
        assert isinstance(values, list)
        return values


_Outcome = tuple[str, float, str]
"""How a test ended, how large its worst value is, and the text of its cell."""


class Results:
    """Collected from reports, also from those of other processes."""

    def __init__(self) -> None:
        self._cells: dict[str, dict[tuple[str, str], list[_Outcome]]] = {}

    def add(self, report) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        for name, place in report.user_properties:
            if name == PROPERTY:
                cells = self._cells.setdefault(place["table"], {})
                key = (place["row"], place["column"])
                cells.setdefault(key, []).append(_described(report, place))

    def write(self, path: Path) -> None:
        """Tables that this run has nothing for stay as they were."""
        text = path.read_text(encoding="utf-8") if path.exists() else f"{BEGIN}\n{END}\n"
        before, _, rest = text.partition(BEGIN)
        written, _, after = rest.partition(END)
        _, *tables = written.split("### ")
        known = {name: f"### {name}\n{table}".strip() for name, _, table in (each.partition("\n") for each in tables)}
        parts = [f"With {_versions()}.", *{**known, **self._tables()}.values()]
        written = "\n\n".join(parts)
        path.write_text(f"{before}{BEGIN}\n{written}\n{END}{after}", encoding="utf-8")
        twin = path.with_suffix(".zh-CN.md")
        if twin.exists():
            twin.write_text(with_chinese_tables(twin.read_text(encoding="utf-8"), written), encoding="utf-8")

    def _tables(self) -> dict[str, str]:
        found = {}
        for table, cells in self._cells.items():
            rows = list(dict.fromkeys(row for row, _ in cells))
            columns = list(dict.fromkeys(column for _, column in cells))
            lines = [f"### {table}", "", f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
            lines += [f"| {row} | {' | '.join(_worst(cells.get((row, c), [])) for c in columns)} |" for row in rows]
            found[table] = "\n".join(lines)
        return found


def with_chinese_tables(page: str, tables: str) -> str:
    """The page in Chinese with these tables, which are those of the English one, between its markers."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    lines = "\n".join(map(_chinese_line, tables.strip().splitlines()))
    return f"{before}{BEGIN}\n{lines}\n{END}{after}"


def read_tables(page: str) -> str:
    return page.partition(BEGIN)[2].partition(END)[0].strip()


def _chinese_line(line: str) -> str:
    if line.startswith("### "):
        return f"### {_chinese(line.removeprefix('### '))}"
    if line.startswith("| "):
        return "|".join(f" {_chinese(cell.strip())} ".replace("  ", " ") for cell in line.split("|"))[1:-1]
    if line.startswith("With "):
        return _chinese(line).removesuffix(".") + "。"
    return line


def _chinese(text: str) -> str:
    for start, chinese in _CHINESE_STARTS.items():
        if text.startswith(start):
            return chinese + text.removeprefix(start)
    return CHINESE.get(text, text)


def _described(report, place) -> _Outcome:
    if report.outcome == "passed":
        return "passed", max(place["values"], default=0.0), _number(place)
    if hasattr(report, "wasxfail"):
        return "failed", 0.0, f"**fails**: {report.wasxfail.removeprefix('reason: ')}"
    if report.outcome == "skipped":
        return "skipped", 0.0, f"not tried: {report.longrepr[2].removeprefix('Skipped: ')}"
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message.splitlines()[0] if crash else "an error"
    return "failed", 0.0, f"**fails**: {message[:100].replace('|', '/')}"


def _number(place) -> str:
    if not place["values"]:
        return "yes"
    worst = max(place["values"])
    if place.get("unit") == "dB":
        return f"{-worst:.0f} dB"
    if place.get("unit") == "programs":
        return f"{worst:.0f}"
    return f"{worst:.0e}".replace("e-0", "e-") if worst else "0"


def _worst(cells: list[_Outcome]) -> str:
    """The text of the worst outcome; of several that passed, the largest value's."""
    return min(cells, key=lambda cell: (_WORST_FIRST.index(cell[0]), -cell[1]))[2] if cells else ""


def _versions() -> str:
    namespace: dict[str, str] = {}
    exec((find_path() / "comfyui_version.py").read_text(encoding="utf-8"), namespace)
    packages = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "torchax", "jax")]
    return ", ".join([f"ComfyUI {namespace['__version__']}", *packages])
