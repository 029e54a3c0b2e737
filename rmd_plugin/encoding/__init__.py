"""From a module and batches to features: hooks, the one encode loop, evaluation mode, RNG isolation."""
