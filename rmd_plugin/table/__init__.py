"""Tables of features in many files: fitted and scored file by file, on one machine or many."""
