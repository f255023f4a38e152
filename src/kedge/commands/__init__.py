"""What each command does, free of the terminal."""
