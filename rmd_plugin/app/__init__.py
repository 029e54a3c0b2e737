"""The commands: compose a config, instantiate, call, write. No maths."""
