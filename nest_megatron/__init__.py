"""Plans for Megatron training jobs: the fastest layout that is expected to fit in memory."""

__version__ = "0.1.0"
