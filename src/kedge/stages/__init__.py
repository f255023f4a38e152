"""One folder a stage kind: `settings.py`, free of torch, and `train.py` or `run.py`; found by entry point."""
