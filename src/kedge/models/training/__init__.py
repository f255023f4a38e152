"""The optimiser step, AdamW, the moving average of weights, and the objectives that are minimised."""
