"""Tenants, their API keys and their adapters. Import the modules you need; this file stays import-light."""
