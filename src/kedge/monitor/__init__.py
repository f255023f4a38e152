"""Watching a run: detectors, the KL contract, the overoptimisation fit, the doctor, and trackers.

Nothing is imported here: each part is loaded by whoever asks for it.
"""
