"""Files of integers for the edge, beside floats and Qwix."""
