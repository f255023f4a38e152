"""What a run leaves behind for people to read: plots, pages, model cards. Nothing is imported here."""
