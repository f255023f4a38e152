"""`kedge import`: a recipe from the configuration of another tool."""
