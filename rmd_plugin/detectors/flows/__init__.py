"""Flows: many masked autoregressive flows at once, their shape (spec), training and scoring."""
