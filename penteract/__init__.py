"""Penteract: the same numbers in every layout."""

__version__ = "0.1.0"
