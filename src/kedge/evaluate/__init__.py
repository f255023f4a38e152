"""Answers of several models to the same prompts, as numbers: scores, win rates and how sure they are.

Everything here is pure: records in, records out. Who samples and who scores is the pipeline's business.
"""
