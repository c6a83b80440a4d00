"""TPU Info: the device panel as text."""

from __future__ import annotations

import time
from typing import Any

from comfy_api.latest import io

from comfy_tpu.comfy.node_text import join_line, lines_as_json
from comfy_tpu.comfy.status import STATUS


class TPUInfo(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TPUInfo",
            display_name="TPU Info",
            category="TPU",
            description="Which devices there are, what is on them, and how the last run went.",
            inputs=[
                io.AnyType.Input(
                    "after", optional=True, tooltip="Anything: the information is gathered once this is there."
                )
            ],
            outputs=[io.String.Output("info", tooltip="The information, as text.")],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> float:
        return time.time()  # the status changes without the node's inputs

    @classmethod
    def execute(cls, after: Any = None) -> io.NodeOutput:
        STATUS.start()
        lines = STATUS.report_lines()
        text = "\n".join(map(join_line, lines))
        # As ComfyUI's own PreviewText, and the same for the browser to translate.
        return io.NodeOutput(text, ui={"text": (text,), "comfy_tpu_lines": lines_as_json(lines)})
