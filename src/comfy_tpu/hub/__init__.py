"""Models of the Hugging Face hub: which files a model needs, their sizes, what is on this machine, and the download."""
