"""Full-integer programs for edge devices: from a float model to an int8 file.

`calibrate` finds the ranges of a model's values, `fake_quantize` trains with them,
`export` writes a LiteRT or ONNX file, `export_signatures` a file of several functions,
`simulate` predicts what the interpreter computes, and `compare` shows where that
differs from the float model. Read `program` first.
"""

from aqtlite.edge import rules
from aqtlite.edge.calibrate import calibrate
from aqtlite.edge.compare import compare
from aqtlite.edge.export import export
from aqtlite.edge.fake_quantize import fake_quantize
from aqtlite.edge.ranges import Range, Ranges
from aqtlite.edge.report import Report
from aqtlite.edge.rules import Rule
from aqtlite.edge.signatures import Signature, export_signatures
from aqtlite.edge.simulate import Simulation, simulate

__all__ = [
    "Range",
    "Ranges",
    "Report",
    "Rule",
    "Signature",
    "Simulation",
    "calibrate",
    "compare",
    "export",
    "export_signatures",
    "fake_quantize",
    "rules",
    "simulate",
]
