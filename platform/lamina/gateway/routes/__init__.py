"""One module per resource; each offers `router`."""
