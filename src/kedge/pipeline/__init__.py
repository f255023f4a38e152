"""Where the parts meet: recipes, stages, the wiring between them, checks, running and resuming."""
