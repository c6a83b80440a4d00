"""The ComfyUI side: nodes that translate between ComfyUI's types and the pipeline. Nothing here computes.

Importing it loads neither jax nor torchax; the first node that runs does.
"""
