"""What stands between a PyTorch model and a TPU: found by reading its source, and by trying a small one."""
