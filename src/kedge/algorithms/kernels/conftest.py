"""Doctests import every module; these need Triton, which torch for the CPU does not bring."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["*.py"]
