"""How the embedded demo model is made and judged: drawn clips with captions, training, a scorer."""
