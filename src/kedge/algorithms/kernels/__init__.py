"""Triton kernels of the algorithms. Nothing here is imported elsewhere: Triton comes with torch for CUDA."""
