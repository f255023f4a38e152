"""Small data and fakes for tests and first recipes, ours and users'."""
