"""The form in ONNX of every operator, a function each. Read `base` first."""
