"""Writes docs/porting-table.md: the results of `comfy-tpu port check` for diffusers' models.

make porting-table
"""
