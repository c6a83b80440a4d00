"""What Prometheus reads."""

from __future__ import annotations

import dataclasses

from comfy_tpu.serving.service import Service


def render_metrics(service: Service) -> str:
    """In Prometheus' text format."""
    counts = service.ledger.counts()
    lines = [
        "# HELP comfy_tpu_jobs Jobs of the ledger by state.",
        "# TYPE comfy_tpu_jobs gauge",
        *(f'comfy_tpu_jobs{{state="{name}"}} {value}' for name, value in dataclasses.asdict(counts).items()),
        "# HELP comfy_tpu_finished_total Jobs that this process finished.",
        "# TYPE comfy_tpu_finished_total counter",
        *(f'comfy_tpu_finished_total{{state="{name}"}} {value}' for name, value in service.finished.items()),
        "# HELP comfy_tpu_stage_seconds_total Seconds of finished jobs by stage.",
        "# TYPE comfy_tpu_stage_seconds_total counter",
        *(f'comfy_tpu_stage_seconds_total{{stage="{name}"}} {value:.6f}' for name, value in service.seconds.items()),
        "# HELP comfy_tpu_steps_total Denoising steps that this process made.",
        "# TYPE comfy_tpu_steps_total counter",
        f"comfy_tpu_steps_total {service.steps}",
        "# HELP comfy_tpu_ready Whether a step was made.",
        "# TYPE comfy_tpu_ready gauge",
        f"comfy_tpu_ready {int(service.is_ready)}",
    ]
    return "\n".join(lines) + "\n"
