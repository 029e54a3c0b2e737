"""Hydra configs, installed as ``rmd_plugin.conf``."""
