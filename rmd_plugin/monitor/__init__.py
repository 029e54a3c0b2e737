"""What OODMonitor is made of: fitting, scoring, sharding, checkpoints, and manners in other people's training."""

# first, because it keeps the imports of Lightning below from changing the user's logging
from rmd_plugin.monitor import lightning_roots as lightning_roots
