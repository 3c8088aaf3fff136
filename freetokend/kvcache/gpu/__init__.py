"""Attention over pages in the memory of a GPU."""
