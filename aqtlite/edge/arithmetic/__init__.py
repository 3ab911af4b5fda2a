"""The arithmetic of LiteRT's operators, integer for integer, on plain arrays."""
