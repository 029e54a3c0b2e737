"""Studies: the paper's tables and figures, parameters -> rows."""
