"""The profile of a token has kernels of every kind."""

import pytest

from benchmarks import token_profile

pytestmark = [pytest.mark.slow, pytest.mark.code("quick")]


def test_every_kind_is_found(capsys):
    token_profile.main(["--layers", "1", "--width", "8", "--rounds", "1"])
    rows = {
        cells[0]: cells[1:]
        for line in capsys.readouterr().out.splitlines()
        if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 5
    }
    kernels = {}
    for kind in (*token_profile.KINDS, token_profile.ALL):
        cells = [cell.removesuffix(" us").split(": ") for cell in rows[kind]]
        assert all(float(micros) > 0 for _, micros in cells)
        kernels[kind] = [int(count) for count, _ in cells]
    floats, dynamic, static, cached = kernels[token_profile.ALL]
    assert floats < min(dynamic, static) and dynamic < cached
    assert len(set(kernels[token_profile.CONTRACTIONS])) == 1
    for row in (token_profile.LIST, token_profile.TREE):
        assert rows[row][0].endswith("us, 1.00 x")
