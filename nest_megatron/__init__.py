"""Fastest layout of a Megatron training job that provably fits in memory."""

__version__ = "0.1.0"
