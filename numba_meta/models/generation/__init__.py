"""Several sequences that grow together, and how long it took."""
