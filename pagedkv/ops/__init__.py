"""Ops: views of a pool and the wrappers of the kernels that read and write through them."""
