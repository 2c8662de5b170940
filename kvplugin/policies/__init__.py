"""Decisions that a user may replace, one folder or file a decision."""
