"""Guards: a classifier, its preprocessing and a calibrated detector in one folder that can be deployed."""
