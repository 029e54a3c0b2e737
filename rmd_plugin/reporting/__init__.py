"""Reporting: rows -> tables, figures and pages. Knows rows, not tensors or models."""
