"""What `kedge judge` does: a judge is asked what people have decided, and measured beside them."""
