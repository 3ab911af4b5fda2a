"""Data with true labels, made on the spot, and a metric for each network."""
