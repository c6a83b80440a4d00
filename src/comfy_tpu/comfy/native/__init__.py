"""Runs the modules of ComfyUI's own MODEL, VAE and CLIP on our devices, traced without changes to their code.

Everything is an object patch on a clone, as in ComfyUI's own Torch Compile node: nothing of ComfyUI is replaced, and
the original is unchanged. A module that cannot be traced runs as it would without us, with one warning that gives the
reason.
"""
