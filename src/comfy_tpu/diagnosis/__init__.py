"""Checks whether this machine can run a model, and suggests commands that fix problems."""

from comfy_tpu.diagnosis.checks import Finding
from comfy_tpu.diagnosis.comfyui import ComfyUIProbes, examine_comfyui
from comfy_tpu.diagnosis.examination import Probes, Report, examine

__all__ = ["ComfyUIProbes", "Finding", "Probes", "Report", "examine", "examine_comfyui"]
