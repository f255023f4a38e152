"""YAML files of settings, with the line of every key, and what is wrong with them in words."""
