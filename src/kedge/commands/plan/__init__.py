"""`kedge plan`: what a recipe will take, and the way of holding its models that fits."""
