"""Writes docs/aten-operators.md: how torchax and comfy-tpu implement torch's operators, and which families use them.

make aten-operators
"""
