"""Weights in, roles out: names of models, loading, built-in models, and the heads that turn hidden states into numbers.

Nothing is imported here, so that resolving a name never pays for torch.
"""
