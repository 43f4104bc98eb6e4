"""LoRA adapters: formats, validation, identity, store, device weights, batched layers.

Import the module you need; this file loads nothing, so that torch-free callers stay torch-free.
"""
