"""CUDA C++ sources, as package data: one source for the GPU and for the cpu device."""
