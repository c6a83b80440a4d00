"""`comfy-tpu serve`: OpenAI's images and videos API over the job ledger."""
