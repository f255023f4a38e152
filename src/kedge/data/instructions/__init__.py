"""Prompts with instructions that a rule can check, from templates of our own: requests, wordings, parameters."""
