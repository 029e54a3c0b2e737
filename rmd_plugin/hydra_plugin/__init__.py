"""Hydra search-path plugin: makes our shared configs visible to other apps."""
