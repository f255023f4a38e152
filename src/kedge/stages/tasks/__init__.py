"""Stage `tasks`: what people are asked."""
