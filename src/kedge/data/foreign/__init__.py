"""Layouts of public datasets and other trainers: one table (`table.py`), one small reader each, canonical rows out."""
