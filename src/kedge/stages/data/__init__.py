"""Stage `data`: read, clean, decontaminate, split."""
