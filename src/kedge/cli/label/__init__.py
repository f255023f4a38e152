"""`kedge label`: the store of people's labels on the command line."""
