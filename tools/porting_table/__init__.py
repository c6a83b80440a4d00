"""Writes docs/porting-table.md: what `comfy-tpu port check` says of diffusers' models.

make porting-table
"""
