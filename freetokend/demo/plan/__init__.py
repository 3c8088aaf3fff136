"""The upcycling plan: its file format, and the developers' tool that makes one from a dense model.

`format` is all that a build needs. The other modules run the dense model in numpy, cluster its FFN
inputs and fit a router; they are used by `python -m freetokend.demo make-plan` only.
"""
