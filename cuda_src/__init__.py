"""CUDA C++ sources, as package data: one source for the GPU and for the cpu device.

Read next: `runtime.cuh`, then `page_address.cuh` and `append.cu`.
"""
