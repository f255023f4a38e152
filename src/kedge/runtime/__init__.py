"""Runtimes decide where roles are placed and how calls to them are run: this process, several alike, or groups."""
