"""The training loop of docs/calibration.md runs, and trains."""

import pathlib
import re
import runpy

import jax
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.code("quick")]

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "calibration.md"


def test_the_training_loop(tmp_path):
    section = PAGE.read_text().split("## A training loop with statistics\n")[1]
    (program,) = re.findall(
        r"^```python\n(.*?)^```", section.split("\n## ")[0], re.M | re.S
    )
    script = tmp_path / "loop.py"
    script.write_text(program)
    page = runpy.run_path(str(script))
    assert page["losses"][-1] < page["losses"][0] / 2
    model, variables, x = page["model"], page["variables"], page["x"]
    assert set(variables) == set(model.init(jax.random.key(0), x))
    counts = {
        jax.tree_util.keystr(path): int(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(variables)
        if jax.tree_util.keystr(path).endswith("hs'].batches")
    }
    # The gradient of the first layer's input is not asked for.
    unused = "['_overwrite_with_gradient']['Dense_0']['dot_general_ab_bc']['dlhs']"
    wanted = {path: 0 if path.startswith(unused) else 20 for path in counts}
    assert counts == wanted and len(counts) == 6
    frozen = page["serving"]["aqt"]["Dense_0"]["kernel"]["rhs"]
    assert frozen.qvalue.dtype == "float8_e4m3fn"
