"""Labels of other tools in, and ours out to them: Argilla, Label Studio, CSV, datasets."""
