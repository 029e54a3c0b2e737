"""Detectors x benchmark -> rows: what each detector is fed, extraction, cache, metrics."""
