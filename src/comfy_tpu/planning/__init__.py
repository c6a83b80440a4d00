"""What a TPU slice would do with a model, before it is rented."""
