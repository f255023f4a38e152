"""Runs while they run: new records since the last look, in a terminal, as plain lines, or on a local web page."""
