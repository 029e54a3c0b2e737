"""What is fitted and scores: moments, Gaussian detectors, flows."""
