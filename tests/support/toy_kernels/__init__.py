"""Kernels that compile well, for the tests of `lamina_kernels.gpu.aot`."""
