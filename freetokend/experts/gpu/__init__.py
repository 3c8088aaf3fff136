"""Routed experts executed from the slots by Triton kernels."""
