"""The built-in stages, one file each, found through the same entry points as anybody's."""
