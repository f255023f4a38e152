"""Kedge: the complete RLHF loop as checked software."""

__version__ = "0.2.0"
