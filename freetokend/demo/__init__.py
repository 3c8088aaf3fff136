"""Offline tool that builds the demo model: a small mixture-of-experts checkpoint with real weights.

`python -m freetokend.demo build --out DIR` writes it; `make-plan` regenerates the plan it is built
from. Nothing else in freetokend imports this package, and it needs no torch.
"""
