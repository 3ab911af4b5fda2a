"""Log-probabilities of decoding beside those of training, bit for bit."""
