"""Rollouts in, scores out: reward models, checks against known solutions, code in a sandbox, judges, and their mixes.

Nothing is imported here, so that the settings of a recipe are checked without torch.
"""
