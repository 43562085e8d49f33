"""kvd: a per-GPU daemon that owns KV-cache memory and moves its blocks between inference engines."""

__version__ = "0.1.0"
