"""The version of this package, without anything else of it."""

__version__ = "0.2.0"
