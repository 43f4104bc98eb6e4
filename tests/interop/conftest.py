"""These tests want LMCache, and skip where it is not installed. `make lmcache-check` brings and runs them."""

import os

os.environ |= {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1", "LMCACHE_LOG_LEVEL": "WARNING"}  # when imported
