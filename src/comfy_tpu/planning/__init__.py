"""Plans a model on a TPU slice before the slice is rented: layouts, memory, traffic, step time."""
