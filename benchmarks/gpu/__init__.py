"""The library on a GPU: timed there, or compiled for one that need not be there."""
