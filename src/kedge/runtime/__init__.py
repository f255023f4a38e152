"""Where roles live. Today: in this process."""
