"""Stage `evaluate`: models compared on held-out prompts."""
