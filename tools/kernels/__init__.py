"""`pagedkv kernels report` and NVRTC, which compiles the shipped kernels for it."""
