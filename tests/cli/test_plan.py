"""``aqtlite plan``, as a user runs it."""

import json

import pytest

import aqtlite
from aqtlite import cli

pytestmark = pytest.mark.code("quick")

FACTORY = """
import jax
from flax import linen as nn, nnx
from aqtlite.flax import AqtDotGeneral, quantize_model

X = jax.ShapeDtypeStruct((2, 4), "float32")

class Mlp(nn.Module):
    cfg: object = None

    @nn.compact
    def __call__(self, x, flip=False):
        x = nn.Dense(8, dot_general=AqtDotGeneral(self.cfg), name="inside")(x)
        return nn.Dense(2, name="float")(x)

def injected(cfg=None):
    return Mlp(cfg), (X,), {"flip": True}

class Descent(nn.Module):
    cfg: object = None

    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(4, dot_general=AqtDotGeneral(self.cfg), name="inside")
        y, pull_back = nn.vjp(lambda dense, x: dense(x), dense, x)
        return dense(x - pull_back(y)[1])

def descent(cfg=None):
    return Descent(cfg), (X,)

def plain():
    return Mlp(), (X,)

def of_nnx():
    model = nnx.eval_shape(lambda: nnx.Linear(4, 2, rngs=nnx.Rngs(0)))
    return model, (X,)

class Norm(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.LayerNorm()(x)

def without():
    return Norm(), (X,)

def without_in_nnx():
    return nnx.eval_shape(lambda: nnx.LayerNorm(4, rngs=nnx.Rngs(0))), (X,)

def misshapen():
    return quantize_model(Mlp(), []), (X, X, X)
"""


@pytest.fixture
def planned(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "planned_models.py"
    path.write_text(FACTORY)

    def run(factory, *options):
        code = cli.main(["plan", "--model", f"{path}:{factory}", *options])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    yield run
    __import__("sys").modules.pop("planned_models", None)


def test_what_is_injected_and_what_is_not(planned):
    code, out, _ = planned("injected", "--preset", "w4a8")
    inside, outside = (
        next(line for line in out.splitlines() if name in line)
        for name in ("Mlp/inside", "Mlp/float")
    )
    assert code == 0 and "2 contractions: 1 quantized, 1 in float" in out
    assert "injected" in inside and "int8 x int4" in inside
    assert "float32[2,4]" in inside and "weight float32[4,8]" in inside
    assert "float: no rule names it" in outside


def test_the_dtypes_on_a_platform(planned):
    _, out, _ = planned("injected", "--preset", "qat", "--platform", "tpu", "--json")
    inside, outside = (row["contracted_in"] for row in json.loads(out))
    gradients = "dlhs float32 x float32; drhs float32 x float32"
    assert inside == f"tpu: fwd int8 x int8; {gradients}"
    assert outside == "tpu: float32 x float32"


@pytest.mark.parametrize(("factory", "count"), [("plain", 2), ("of_nnx", 1)])
def test_a_float_model_is_quantized_by_the_preset(factory, count, planned):
    _, out, _ = planned(factory, "--preset", "qat", "--json")
    rows = json.loads(out)
    assert [row["rule"] for row in rows] == [0] * count
    assert {row["why_float"] for row in rows} == {None}
    assert f"0 quantized, {count} in float" in planned(factory)[1]


def test_a_narrow_terminal_gets_paragraphs(planned, monkeypatch):
    monkeypatch.setattr("aqtlite.cli.output._UNLIMITED", 60)
    _, out, _ = planned("plain", "--preset", "qat")
    assert "\nMlp/inside\n    int8 x int8, rule 0\n    ab,bc->ac: acti" in out


def test_a_model_that_raises(planned):
    code, _, err = planned("misshapen")
    assert code == 2
    assert err.startswith("aqtlite plan: error: tracing QuantizedModel with the sample")


@pytest.mark.parametrize("factory", ["without", "without_in_nnx"])
@pytest.mark.parametrize("preset", [(), ("--preset", "qat")])
@pytest.mark.parametrize("measure", [(), ("--measure", "serving")])
def test_a_model_without_contractions(factory, preset, measure, planned):
    code, out, err = planned(factory, *preset, *measure)
    assert code == (2 if preset or measure else 0)
    assert "the program has no contractions" in " ".join((out + err).split())
    assert "sample inputs" not in err and "--preset" not in err


def test_rules_that_match_nothing_are_not_blamed_on_the_inputs(planned, tmp_path):
    rules = tmp_path / "rules.json"
    chosen = [aqtlite.Rule(path="missing", cfg=aqtlite.config.fully_quantized())]
    rules.write_text(aqtlite.rules.to_json(chosen))
    code, _, err = planned("plain", "--rules", str(rules))
    assert code == 2 and "sample inputs" not in err
    assert err.startswith("aqtlite plan: error: rule 0 (path='missing') matches noth")


def test_measured_contractions(planned):
    code, out, _ = planned("plain", "--preset", "qat", "--measure", "serving", "--json")
    fields = json.loads(out)
    assert code == 0 and fields["purpose"] == "serving"
    paths = [path for one in fields["contractions"] for path in one["paths"]]
    assert paths == ["Mlp/inside", "Mlp/float"]
    code, _, err = planned("plain", "--measure", "serving")
    assert code == 2 and "name a config by --preset" in err
    code, out, _ = planned("plain", "--preset", "qat", "--measure", "training")
    assert code == 0 and out.startswith("training on ")


def test_times_are_kept_for_the_next_call(planned, tmp_path):
    options = ("of_nnx", "--preset", "qat", "--measure", "serving", "--json")
    _, first, err = planned(*options)
    (path,) = (tmp_path / "cache" / "aqtlite").iterdir()
    assert err == f"the times are kept in {path}: delete it to measure them again\n"
    assert planned(*options)[1] == first
    path.unlink()
    assert planned(*options)[1] != first


def test_a_user_without_a_home(planned, monkeypatch):
    def no_user(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", no_user)
    options = ("--preset", "qat", "--measure", "serving")
    code, out, err = planned("of_nnx", *options)
    assert code == 0 and out.startswith("serving on ")
    assert "the times are not kept" in err and "set HOME or XDG_CACHE_HOME" in err


def test_times_that_cannot_be_kept(planned, tmp_path):
    (tmp_path / "cache").write_text("a file")
    options = ("--preset", "qat", "--measure", "serving")
    code, out, err = planned("of_nnx", *options)
    assert code == 0 and out.startswith("serving on ")
    assert "the times are not kept" in err and "cache" in err
