"""Artifact mode: instances of NEST's published solver, searched and priced under its own formula.

Source: scai-tech/Nest at 3e163ad (MIT), ``nest/Solver/device_placement/device_placement.cpp``, and
the paper, arXiv 2603.06798. Times are in the instance's unit, which its authors take as
milliseconds; link terms are in seconds and are added to them (``price.ArtifactRule`` names this
and the formula's other peculiarities, each with a switch).
"""
