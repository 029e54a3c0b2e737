"""Backbones: one file per family of networks."""
