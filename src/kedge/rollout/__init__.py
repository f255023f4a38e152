"""Prompts in, Rollouts out: the local engine, how it samples, and how far generation may run ahead.

`settings` is free of torch, so that a recipe is checked without it.
"""
