"""Naive references, one row at a time: slow, obvious, in the precision of their inputs (use float64)."""
