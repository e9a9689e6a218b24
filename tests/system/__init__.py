"""Tests in a booted Debian 12 container. A package, so that its conftest is not taken for that of tests/."""
