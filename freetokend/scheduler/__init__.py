"""Continuous batching: which tokens of which requests the next step computes. Torch-free."""
