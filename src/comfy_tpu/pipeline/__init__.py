"""The pipeline from a prompt to a video: encode the text, denoise latents, decode frames."""
