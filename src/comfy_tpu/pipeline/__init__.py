"""A prompt becomes a video: encode the text, denoise latents, decode frames."""
