"""Runs of different methods side by side: a table with a row a run, and scores against KL."""
