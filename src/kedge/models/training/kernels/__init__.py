"""Triton kernels that learning on a GPU uses. Nothing here is imported elsewhere: Triton comes with torch for CUDA."""
