"""The report of a run: a summary in words, curves, samples, events, origins and cost, on one page that stands alone."""
