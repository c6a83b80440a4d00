"""The words of a page of results: English, and what stands for each of them in Chinese."""

from __future__ import annotations

from typing import Literal, get_args

from comfy_tpu.errors import InvalidValueError

Language = Literal["en", "zh-CN"]
LANGUAGES: tuple[Language, ...] = get_args(Language)

CHINESE = {
    # Titles of the parts of a run.
    "Transformer, one forward": "Transformer，一次前向",
    "Error of two blocks of the transformer against float32": "Transformer 两个 block 相对 float32 的误差",
    "Best rates of the device, in the same run": "同一次运行中测得的设备最高速率",
    "VAE": "VAE",
    "Text encoder": "文本编码器",
    "From nothing to a program, and from the cache in a new process": "从零生成程序，以及在新进程中从缓存取得程序",
    "End to end": "端到端",
    "Cost against tokens and devices": "开销随 token 数和设备数的变化",
    "Runs": "各次运行",
    # Titles of columns.
    "what": "项目",
    "size": "尺寸",
    "by": "实现",
    "tokens": "token 数",
    "mesh": "mesh",
    "batch": "batch",
    "devices": "设备数",
    "median": "中位数",
    "min – max": "最小 – 最大",
    "n": "次数",
    "TFLOP/s": "TFLOP/s",
    "of the floor": "达到下限的",
    "ours is faster": "我们快",
    "fp8 is faster": "fp8 快",
    "error": "误差",
    "first call": "首次调用",
    "import": "导入",
    "build": "构建",
    "trace": "追踪",
    "lower": "降级",
    "compile": "编译",
    "programs": "程序数",
    "from the cache": "来自缓存",
    "FLOPs a device": "每设备 FLOPs",
    "steps": "步数",
    "attention by": "注意力由",
    "not measured": "未测",
    "against": "随",
    "from – to": "范围",
    "exponent": "指数",
    "date": "日期",
    "command": "命令",
    "versions": "版本",
    # Cells.
    "yes": "是",
    "no": "否",
    "operations, counted": "运算量（计数）",
    "wall time": "墙钟时间",
    "operations a device, by XLA": "每设备运算量（XLA 统计）",
    # Sentences, and parts of them.
    "seconds by peer": "各实现所用秒数",
    "cost against {against}": "开销随{against}的变化",
    "a small {family}": "小型 {family}",
    "mesh {mesh}": "mesh {mesh}",
    "driver {driver}": "驱动 {driver}",
    "{processor}, {cores} cores, {memory}": "{processor}，{cores} 核，{memory}",
    " A CPU shows that everything runs and what it costs to start; speed is measured on accelerators.": (
        "CPU 只能说明一切都能运行、启动要多少时间；速度要在加速器上测。"
    ),
    ", ": "，",
    "; ": "；",
    ".": "。",
}
"""Names in the results themselves (`forward`, `diffusers eager`) stay as they are in the JSON."""


def translate(text: str, language: Language) -> str:
    """Raises InvalidValueError for a text that has no Chinese."""
    if language == "en":
        return text
    if text not in CHINESE:
        raise InvalidValueError(f"{text!r} has no Chinese; add it to CHINESE in bench/words.py")
    return CHINESE[text]
