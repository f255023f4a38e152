"""Models side by side on what was measured of them: one page, from plain records."""
