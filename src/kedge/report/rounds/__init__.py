"""The page over all rounds of a recipe."""
