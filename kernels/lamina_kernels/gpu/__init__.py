"""Triton kernels: one file per kernel, each with an oracle of the same signature in `lamina_kernels.oracles`.

Importing a kernel imports triton; nothing outside `lamina_kernels.dispatch` and the wiring does so.
"""
