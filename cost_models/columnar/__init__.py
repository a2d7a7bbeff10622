"""Columns of plan tables: distinct values are computed once."""
