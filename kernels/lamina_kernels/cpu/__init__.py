"""Kernels in C for CPUs, built at first use with the machine's own compiler."""
