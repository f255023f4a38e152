"""What is known of tensors beside their values."""
