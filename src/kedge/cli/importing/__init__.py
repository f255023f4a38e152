"""`kedge import` on the command line."""
