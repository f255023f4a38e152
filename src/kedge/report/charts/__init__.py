"""The chart renderer of all pages, as inline SVG: `plot` says what is shown, `svg` draws it. No plotting library."""
