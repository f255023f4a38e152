"""Recipes: YAML with line numbers, settings, wiring between stages, templates, and the runner."""
