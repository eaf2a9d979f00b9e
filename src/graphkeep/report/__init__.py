"""Reading what a run has written: one file a format. Nothing here needs torch, and nothing in a data file is executed."""
