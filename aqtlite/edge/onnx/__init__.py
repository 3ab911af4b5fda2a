"""ONNX files of full-integer programs, for onnxruntime.

Every value passes through QuantizeLinear and DequantizeLinear, and onnxruntime fuses
these with the operators between them into integer operators. Read `write` first.
"""
