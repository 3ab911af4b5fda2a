"""The benchmark of pods counts what a training step exchanges."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from aqtlite.reporting import collectives
from benchmarks.harness.contestants import AQTLITE
from benchmarks.pods.__main__ import QUICK
from tests.common import QUICK_FLAGS

PROGRAM = """
%condition (state: (s32[], s8[4,8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(7)
  %state = (s32[]{:T(128)}, s8[4,8]{1,0}) parameter(0)
  %counter = s32[]{:T(128)} get-tuple-element(%state), index=0
  ROOT %less = pred[]{:T(512)} compare(%counter, %limit), direction=LT
}

%kernel (x: s8[4,8]) -> s8[8,8] {
  %x.1 = s8[4,8]{1,0} parameter(0)
  ROOT %gather = s8[8,8]{1,0} all-gather(%x.1), channel_id=1, \
replica_groups=mesh['a'=4,'b'=2] {'b'}, dimensions={0}
}

%body (state: (s32[], s8[4,8])) -> (s32[], s8[4,8]) {
  %two = s32[] constant(2)
  %state.1 = (s32[]{:T(128)}, s8[4,8]{1,0}) parameter(0)
  %x = s8[4,8]{1,0} get-tuple-element(%state.1), index=1
  %counter.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  %first = s8[8,8]{1,0} fusion(%x), kind=kCustom, calls=%kernel
  %again = s8[8,8]{1,0} all-gather(%x), channel_id=1, \
replica_groups=mesh['a'=4,'b'=2] {'b'}, dimensions={0}
  %start = (s8[4,8]{1,0}, s8[4,8]{1,0}, u32[], u32[]) \
collective-permute-start(%x), channel_id=2, source_target_pairs={{0,1},{1,0}}
  %done = s8[4,8]{1,0} collective-permute-done(%start)
  %next = s32[]{:T(128)} add(%counter.1, %two)
  ROOT %new = (s32[]{:T(128)}, s8[4,8]{1,0}) tuple(%next, %done)
}

ENTRY %main (x: s8[4,8]) -> f32[16] {
  %zero = s32[] constant(0)
  %x.2 = s8[4,8]{1,0} parameter(0)
  %before = (s32[]{:T(128)}, s8[4,8]{1,0}) tuple(%zero, %x.2)
  %after = (s32[]{:T(128)}, s8[4,8]{1,0}) while(%before), \
condition=%condition, body=%body
  %y = f32[16]{0} constant({...})
  ROOT %sum = f32[16]{0} all-reduce(%y), channel_id=3, replica_groups=[2,4]<=[8]
}
"""


def test_collectives_in_the_loops_of_a_tpu_program():
    """A loop has the trips of its counter, and a channel is one collective."""
    found = collectives.of_text(PROGRAM)
    assert {(one.op, one.times, one.sent) for one in found} == {
        ("all-gather", 4, 4 * 64 // 2),
        ("collective-permute", 4, 4 * 32),
        ("all-reduce", 1, 2 * 64 * 3 // 4),
    }
    assert len(found) == 3


ASYNCHRONOUS = """
HloModule step, num_partitions=4

ENTRY %main (x: s32[8], y: s32[4]) -> (s32[2], s32[1]) {
  %x = s32[8]{0} parameter(0)
  %y = s32[4]{0} parameter(1)
  %start = ((s32[8]{0}, s32[4]{0}), (s32[2]{0}, s32[1]{0})) \
reduce-scatter-start(%x, %y), channel_id=1, replica_groups=[1,4]<=[4]
  ROOT %done = (s32[2]{0}, s32[1]{0}) reduce-scatter-done(%start)
}
"""


def test_the_results_of_an_asynchronous_reduce_scatter():
    (one,) = collectives.of_text(ASYNCHRONOUS)
    assert list(map(str, one.results)) == ["int32[2]", "int32[1]"]
    assert one.sent == 3 * 4 * (2 + 1)


CONDITIONAL = """
%small (x.1: s32[4]) -> s32[4] {
  %x.1 = s32[4]{0} parameter(0)
  ROOT %sum.1 = s32[4]{0} all-reduce(%x.1), channel_id=1, replica_groups=[1,2]<=[2]
}

%large (x.2: s32[4]) -> s32[4] {
  %x.2 = s32[4]{0} parameter(0)
  %first = s32[4]{0} all-reduce(%x.2), channel_id=2, replica_groups=[1,2]<=[2]
  ROOT %second = s32[4]{0} all-reduce(%first), channel_id=3, replica_groups=[1,2]<=[2]
}

ENTRY %main (fits: pred[], x: s32[4]) -> s32[8] {
  %fits = pred[] parameter(0)
  %x = s32[4]{0} parameter(1)
  %sum = s32[4]{0} conditional(%fits, %x, %x), BRANCHES
  ROOT %all = s32[8]{0} all-gather(%sum), channel_id=4, replica_groups=[1,2]<=[2]
}
"""


@pytest.mark.parametrize(
    "branches",
    [
        "branch_computations={%large, %small}",
        "true_computation=%small, false_computation=%large",
    ],
)
def test_only_the_cheaper_branch_of_a_conditional_is_counted(branches):
    found = collectives.of_text(CONDITIONAL.replace("BRANCHES", branches))
    assert [one.op for one in found] == ["all-reduce", "all-gather"]


@pytest.mark.slow
def test_weights_travel_as_integers(tmp_path):
    written = tmp_path / "pods.json"
    process = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.pods", "--quick"),
            *("--strategies", "FSDP", "--contestants", AQTLITE),
            *("--json", str(written)),
        ],
        cwd=pathlib.Path(__file__).parents[2],
        env={**os.environ, "XLA_FLAGS": QUICK_FLAGS},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert "all-gather int8" in process.stdout
    sent = {
        one["case"].get("collectives"): one["median"]
        for one in json.loads(written.read_text())["figures"]
        if one["case"]["phase"] == "sent"
    }
    weights = sum(rows * columns for _, rows, columns in QUICK.weights().values())
    # Once forward and once backward, by 7 of 8 devices.
    assert sent["all-gather int8"] == 2 * QUICK.layers * weights * 7 / 8
    assert sum(sent.values()) == 2 * sent[None]
