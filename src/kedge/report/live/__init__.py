"""Running runs: new records since the last read, in a terminal, as plain lines, or on a local web page."""
