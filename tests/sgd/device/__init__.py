"""A pretend device for tests: CPU memory that refuses to be mixed with the CPU's own tensors."""
