"""ComfyUI's own MODEL, VAE and CLIP with their heavy parts on our devices: ComfyUI's modules are traced as they are.

Everything is an object patch on a clone, as ComfyUI's own Torch Compile node works: nothing of ComfyUI is replaced,
the original is unharmed, and whatever cannot be traced runs as it would without us, with one warning that says why.
"""
