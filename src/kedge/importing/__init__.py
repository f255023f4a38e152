"""Configurations of other tools, read as Kedge recipes: every field is taken, changed, not needed or refused."""
