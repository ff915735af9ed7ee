"""megatron-core's own layers, built for one rank on any machine: on a GPU, on a CPU, or as shapes.

The extractor records what these layers do; the profiler times them. torch and megatron-core are
imported inside functions, so that importing this room costs nothing.
"""
