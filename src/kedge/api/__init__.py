"""Kedge for Python scripts: recipes as dicts, stages as classes, rewards as functions, data in memory, runs to read.

Nothing else in Kedge imports this package; `kedge` exports its names. Settings, checks and run folders are those of
recipes: a class makes a recipe of one stage and runs it.
"""
