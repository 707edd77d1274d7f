"""The CPU's own kernels: C++ behind ctypes, compiled where the image is built or at the first start."""
