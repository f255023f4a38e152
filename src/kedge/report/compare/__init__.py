"""Runs of different methods side by side: one row a run, and what they reached over how far they went."""
