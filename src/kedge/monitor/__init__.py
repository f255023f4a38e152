"""Monitoring of runs: detectors, alerts, the overoptimisation fit, the doctor, and trackers.

Nothing is imported here: each part is imported where it is used.
"""
