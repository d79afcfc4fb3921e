"""JetSpec++: the next block is drafted for predicted outcomes of the current one. Plain torch."""
