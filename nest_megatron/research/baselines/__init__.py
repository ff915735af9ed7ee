"""Planners of other papers and tools on the shared cost model, to compare ours with.

Each is a pure function of a ``ComparisonJob`` in a separate file, whose docstring says what it
keeps of its source and what it leaves out. All choose among the very grids and stage partitions
that our search covers (``solver.grids``, ``solver.chunk_space``), so that none of them can be
faster than a search that ended with a proof; ours never sees their plans. Where a method would
choose something that Megatron cannot launch (11 stages of 46 replicas on 512 GPUs), it is held to
the grids that it can.

What the user fixes or limits holds for all of them, also in a dimension that a method does not
search. All use every GPU.
"""
