"""The experiments of the NEST paper (arXiv 2603.06798), run again on the shared cost model."""
