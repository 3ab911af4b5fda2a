"""Quantized contractions for Flax Linen, and the conversion of Linen models."""
