"""The cpu device: the same CUDA C++ sources, run by threads of this process."""
