"""Curves over the steps of a run as inline SVG: decimated, drawn and marked; no plotting library, no script needed."""
