"""The cuda device: kernels, graphs and memory of a GPU, through CuPy."""
