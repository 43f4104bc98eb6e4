"""Kernels with one fault each, for the tests of `lamina_kernels.gpu.aot`."""
