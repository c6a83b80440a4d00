"""Writes docs/aten-operators.md: what torchax and we make of torch's operators, and who uses which.

make aten-operators
"""
