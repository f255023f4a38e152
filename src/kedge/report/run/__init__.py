"""The report of a run: its story in words, curves, samples, events, origins and cost, on one page that stands alone."""
