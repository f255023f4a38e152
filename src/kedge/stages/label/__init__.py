"""Stage `label`: what people say of tasks."""
