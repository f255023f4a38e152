"""What `kedge chat` does: conversations with one model or two, streamed, and verdicts on answers written as data."""
