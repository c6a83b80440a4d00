"""What reading a safetensors file may raise."""

from safetensors import SafetensorError

SAFETENSORS_ERRORS = (SafetensorError, OSError, RuntimeError)
"""RuntimeError: of torch, which opens and maps the file, and has it for whatever the operating system refuses."""
