"""Triton kernels of a decoding step, and the functions that launch them. The torch path computes the same numbers.

Nothing here is imported unless a GPU decodes: Triton comes with torch for CUDA. `chained` lets a kernel come up while
the one before it ends (programmatic dependent launch, compute capability 9): all kernels of a chain must say so.
"""
