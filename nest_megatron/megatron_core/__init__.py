"""megatron-core's own layers, built for one rank on any machine: on a GPU, on a CPU, or as shapes.

Building: ``stage`` makes megatron-core's configuration and the process groups of one rank, with
what a machine without a GPU or Transformer Engine lacks (``substitutes``); ``units`` builds the
embedding, the layers and the head. The profiler times these units.

Recording: ``layers`` runs a unit under ``recorder`` and returns its ``LayerGraph``, kept
in a file; ``chain`` does the same for any PyTorch module, by ``fx``: its ``ChainGraph``.

torch and megatron-core are imported inside functions, so that importing this package costs nothing.
"""
