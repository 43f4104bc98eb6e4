"""Kernels and their torch oracles behind one dispatch."""
