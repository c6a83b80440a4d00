"""`comfy-tpu port new`: a family for a diffusers pipeline, learned from a small one that runs."""
