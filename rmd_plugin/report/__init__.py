"""Rows -> tables and figures. Knows rows and arrays of scores, not tensors or models."""
