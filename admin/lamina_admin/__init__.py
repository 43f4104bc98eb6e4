"""The operator's dashboard: it gets its rooms with the dashboard issue; today this is only its place."""
