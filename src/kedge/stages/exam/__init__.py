"""Stage `exam`: models asked questions with known answers."""
