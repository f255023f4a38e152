"""`kedge plan`: what a recipe will take."""
