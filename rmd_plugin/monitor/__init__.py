"""What OODMonitor is made of: fitting, scoring, sharding, checkpoints, and manners in other people's training."""
