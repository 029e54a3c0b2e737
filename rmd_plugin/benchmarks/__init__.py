"""Benchmarks: one file per OOD benchmark, each a ``pytorch_ood.benchmark.Benchmark``."""
