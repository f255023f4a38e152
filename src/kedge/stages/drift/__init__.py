"""Stage `drift`: a round beside those before it."""
