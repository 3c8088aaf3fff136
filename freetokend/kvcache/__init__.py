"""Paged keys and values: the page allocator, the memory, and the views a step attends through."""
