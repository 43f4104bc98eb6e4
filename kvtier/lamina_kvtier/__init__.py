"""Paged KV storage: block identity, block pool, prefix index, manager."""
