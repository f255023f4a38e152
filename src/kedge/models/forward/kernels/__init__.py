"""Triton kernels of the forward pass. Nothing here is imported elsewhere: Triton comes with torch for CUDA."""
