"""The grids of the package, for tests of what all of them do."""

from aqtlite.numerics import Float, IntAffine, IntSymmetric, NormalFloat

_FLOATS = {
    name: Float.from_dtype(name)
    for name in (
        "float4_e2m1fn",
        "float6_e2m3fn",
        "float6_e3m2fn",
        "float8_e3m4",
        "float8_e4m3fn",
        "float8_e4m3b11fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float16",
    )
}
GRIDS = {
    "int1": IntSymmetric(bits=1),
    "int2": IntSymmetric(bits=2),
    "int3_halves": IntSymmetric(bits=3, preserve_zero=False),
    "int4_unclipped": IntSymmetric(bits=4, clip=False),
    "int8": IntSymmetric(bits=8),
    "int8_max": IntSymmetric(bits=8, preserve_max_val=True),
    "int16": IntSymmetric(bits=16),
    "uint8": IntAffine(bits=8),
    "uint2": IntAffine(bits=2),
    "int5_affine": IntAffine(bits=5, signed=True, narrow_range=True),
    "e1m2": Float(exponent_bits=1, mantissa_bits=2),
    "e3m0": Float(exponent_bits=3, mantissa_bits=0),
    "e5m0": Float(exponent_bits=5, mantissa_bits=0),
    **_FLOATS,
    "nf4": NormalFloat(),
}
