"""Runtimes decide where roles are placed and how calls to them are run. There is one: this process."""
