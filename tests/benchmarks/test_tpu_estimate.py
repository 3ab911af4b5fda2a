"""The estimate for a TPU adds up what XLA expects of each kernel."""

from benchmarks import tpu_estimate

PROGRAM = """
%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %again = f32[8]{0} fusion(%x), backend_config={"estimated_cycles":"20"}
}

%condition (state: (s32[], f32[8])) -> pred[] {
  ROOT %less = pred[] fusion(%i), backend_config={"estimated_cycles":"1"}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %once = f32[8]{0} fusion(%x), backend_config={"estimated_cycles":"300"}
  %loop = (s32[], f32[8]{0}) while(%start), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"4"}}
}
"""


def test_cycles_of_loops_are_those_of_all_rounds():
    assert tpu_estimate.estimated_cycles(PROGRAM) == 300 + 4 * (20 + 1)
