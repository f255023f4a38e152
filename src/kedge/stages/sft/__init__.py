"""Stage `sft`: supervised fine-tuning."""
