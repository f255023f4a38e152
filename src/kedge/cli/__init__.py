"""The command line: one thin file a command. Nothing here imports torch before a command needs it."""
