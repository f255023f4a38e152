"""`kedge export`: a model for other programs."""
