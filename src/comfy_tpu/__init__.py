"""Diffusion models on TPU, GPU and CPU: PyTorch modules traced once by torchax, run as plain JAX programs.

Importing this package starts nothing: neither jax nor torch is loaded until a function that needs them is called.
"""

__version__ = "0.1.0"
