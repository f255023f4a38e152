"""Answers of several models to the same prompts, as numbers: scores, win rates and their intervals.

Everything here is pure: records in, records out. The stage samples and scores the answers.
"""
