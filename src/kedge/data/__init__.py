"""Text in, records out: readers, formats, chat templates, tokenising, audit, splits."""
