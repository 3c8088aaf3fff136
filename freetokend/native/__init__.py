"""Typed faces of the C++ extension modules: kernels (`_exec`), pool and loader (`_host`).

Nothing here imports torch; buffers cross as addresses and file descriptors.
"""
