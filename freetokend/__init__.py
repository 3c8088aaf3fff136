"""freetokend: an OS-level service that serves MoE language models larger than VRAM."""

__version__ = "0.1.0"
