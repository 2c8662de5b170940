"""Measurements of kvplugin: `python -m benchmarks [NAME]`."""
