"""Fixtures that several folders of tests share live in tests/fixtures, one topic a file."""

pytest_plugins = ["fixtures.model", "fixtures.postgres", "fixtures.tenancy"]
