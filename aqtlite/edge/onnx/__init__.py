"""ONNX files of full-integer programs, for onnxruntime.

Every value stands between QuantizeLinear and DequantizeLinear, and onnxruntime makes
operators of integers of what is between them. Read `write` first.
"""
