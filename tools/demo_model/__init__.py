"""Trains and evaluates the embedded demo model: drawn clips with captions, training, a scorer."""
