"""`kedge launch`: a recipe on a cluster."""
