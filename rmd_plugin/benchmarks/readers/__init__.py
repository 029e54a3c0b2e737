"""Readers of file formats. Nothing in a file is trusted: what is wrong with it ends in one error that names it."""
