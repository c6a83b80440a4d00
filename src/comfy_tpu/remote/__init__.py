"""A pipeline whose stages run on a server of `comfy-tpu serve`. Needs neither jax nor a device."""
