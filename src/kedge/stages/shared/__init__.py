"""What the stages share: context, device, the supervised loop, samples, and the arithmetic of batches in words."""
