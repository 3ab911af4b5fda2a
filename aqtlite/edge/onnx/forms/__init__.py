"""The form in ONNX of every operator."""
