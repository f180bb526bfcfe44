"""Training examples: one format, loaders for what exists already, guards against leaks."""
