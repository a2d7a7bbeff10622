"""Columns of plan tables that are computed once for each distinct value or row."""
