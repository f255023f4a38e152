"""Reward models and ensembles, in memory and on disk."""
