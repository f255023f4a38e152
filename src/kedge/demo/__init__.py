"""The demo: a small world whose true preference is known, a model of its words, and the recipe that runs on them."""
