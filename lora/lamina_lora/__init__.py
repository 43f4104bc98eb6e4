"""LoRA adapters: formats, validation, identity, store, device weights, batched layers."""
