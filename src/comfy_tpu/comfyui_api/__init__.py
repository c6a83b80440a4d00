"""A client of a running ComfyUI: a workflow is queued over HTTP, followed, and its results are fetched."""
