"""docs/coming_from_aqt.md runs, and its recipes are those of AQT."""

import functools
import pathlib
import re
import runpy

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from aqt.jax.v2 import calibration as aqtp_calibration
from aqt.jax.v2 import config as aqtp_config

import aqtlite
from aqtlite import calibration, config, flax, numerics
from aqtlite.flax import AqtDotGeneral, calibrate, convert
from tests.common import MATMUL, normal, relative_error, value_and_gradients

pytestmark = pytest.mark.code("quick")

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "coming_from_aqt.md"
TOLERANCE = 2e-6  # which the page states
NEAREST = numerics.IntSymmetric(bits=8)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """What the page's code defines."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    script = tmp_path_factory.mktemp("page") / "page.py"
    script.write_text("\n".join(blocks))
    return runpy.run_path(str(script))


def aqtp_int8(local_shard_count=0):
    """MaxText's recipe, without its noise."""
    tiles = None
    if local_shard_count:
        tiles = aqtp_config.LocalAqt(contraction_axis_shard_count=local_shard_count)
    cfg = aqtp_config.config_v3(
        fwd_bits=8,
        dlhs_bits=8,
        drhs_bits=8 if local_shard_count else None,
        drhs_local_aqt=tiles,
        drhs_accumulator_dtype=jnp.int32 if local_shard_count else None,
    )
    aqtp_config.set_stochastic_rounding(cfg, False, False, "jax.uniform")
    return cfg


def aqtp_clipped():
    cfg = aqtp_config.dot_general_make(lhs_bits=8, rhs_bits=4)
    cfg.fwd.dg_quantizer.rhs.calibration = functools.partial(
        aqtp_calibration.AbsMaxCalibration, clipping_scale=0.8
    )
    return cfg


def aqtp_fp8_full(bounds=None):
    cfg = aqtp_config.config_v4(
        fwd_bits="e4m3",
        dlhs_bits="e5m2",
        drhs_bits="e5m2",
        fwd_accumulator_dtype=jnp.float32,
        dlhs_accumulator_dtype=jnp.float32,
        drhs_accumulator_dtype=jnp.float32,
        dlhs_use_fwd_quant=False,
        drhs_use_fwd_quant=False,
    )
    aqtp_config.set_stochastic_rounding(cfg, False, False, "jax.uniform")
    sides = [
        getattr(raw.dg_quantizer, side)
        for raw in (cfg.fwd, cfg.dlhs, cfg.drhs)
        for side in ("lhs", "rhs")
    ]
    for side, bound in zip(sides, bounds or [None] * 6, strict=True):
        side.calib_shared_axes = "per_tensor"
        if bound is not None:
            side.calibration = functools.partial(
                aqtp_calibration.ConstantCalibration, bound=bound
            )
    return cfg


BOUNDS = (3.0, 2.0, None, 2.5, 4.0, None)
CLIPPED = {"__default__": {"w_bits": 4, "a_bits": 8, "w_scale": 0.8}}
UNROUNDED = {"dlhs.lhs.numerics": NEAREST}

RECIPES = {
    "int8": (
        lambda page: config.update(page["int8"](), UNROUNDED),
        aqtp_int8,
    ),
    "int8, tiles": (
        lambda page: config.update(
            page["int8"](2), UNROUNDED | {"drhs.lhs.numerics": NEAREST}
        ),
        lambda: aqtp_int8(2),
    ),
    "int8w": (
        lambda page: page["int8w"](),
        lambda: aqtp_config.dot_general_make(lhs_bits=None, rhs_bits=8),
    ),
    "int4w": (
        lambda page: page["int4w"](),
        lambda: aqtp_config.dot_general_make(lhs_bits=None, rhs_bits=4),
    ),
    "w4a8": (
        lambda page: page["w4a8"](),
        lambda: aqtp_config.dot_general_make(lhs_bits=8, rhs_bits=4),
    ),
    "intmp": (lambda page: page["intmp"](CLIPPED, "any"), aqtp_clipped),
    "aqt_fp8": (
        lambda page: page["aqt_fp8"](),
        lambda: aqtp_config.config_v4(
            fwd_bits="e4m3",
            dlhs_bits=None,
            drhs_bits=None,
            fwd_accumulator_dtype=jnp.float32,
        ),
    ),
    "aqt_fp8_full": (lambda page: page["aqt_fp8_full"](), aqtp_fp8_full),
    "aqt_fp8_full, bounds": (
        lambda page: page["aqt_fp8_full"](BOUNDS),
        lambda: aqtp_fp8_full(BOUNDS),
    ),
}


@pytest.mark.slow
def test_recipes_are_those_of_aqt(page):
    """Output and gradients, all recipes in one program."""
    lhs, rhs = normal((6, 32)), normal((32, 5))
    pairs = {
        name: (aqtlite.make_dot_general(ours(page)), theirs())
        for name, (ours, theirs) in RECIPES.items()
    }

    @jax.jit
    def run(lhs, rhs):
        return {
            name: [value_and_gradients(dot, lhs, rhs, MATMUL) for dot in pair]
            for name, pair in pairs.items()
        }

    for name, (got, wanted) in run(lhs, rhs).items():
        for what, one, other in zip(("out", "dlhs", "drhs"), got, wanted, strict=True):
            assert relative_error(one, other) <= TOLERANCE, (name, what)


def test_single_rules_are_the_presets(page):
    for name, rule in {
        "int8w": {"w_bits": 8},
        "int4w": {"w_bits": 4},
        "w4a8": {"w_bits": 4, "a_bits": 8},
    }.items():
        assert page["intmp"]({"__default__": rule}, "any") == page[name](), name
    assert page["intmp"]({}, "any") == config.unquantized()


def test_last_pattern_decides_about_intmp(page):
    layers = {".*": {"w_bits": 4}, ".*/wo": {"a_bits": 8}, "__default__": {"w_bits": 8}}
    assert page["intmp"](layers, "mlp/wi") == config.weight_only(4)
    assert page["intmp"](layers, "mlp/wo") == config.fully_quantized(bwd_bits=None)


def test_names_of_maxtext_have_what_to_write(page):
    """Every cell of the table is a config, or rules."""
    names = {**page, "count": 2, "rules": CLIPPED, "path": "any"}
    names |= {"layers": CLIPPED}
    made = []
    for _, qwix, other in rows(PAGE.read_text(), "| `quantization=` | `use_qwix"):
        for code in re.findall(r"`([\w.]+\(.*?\))`", f"{qwix} {other}"):
            made.append(eval(code, dict(names)))
    configs = [one for one in made if isinstance(one, config.DotGeneral)]
    of_rules = [one for one in made if not isinstance(one, config.DotGeneral)]
    assert len(configs) > 10
    assert len(of_rules) == 6
    assert all(isinstance(rule, aqtlite.Rule) for one in of_rules for rule in one)


class Layers(nn.Module):
    """Paths as MaxText's."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, name="wi")(x)
        x = nn.Einsum((8, 8), "bk,kn->bn", name="einsum")(x)
        return nn.Dense(4, name="wo")(x)


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="head")(Layers(name="layers")(x))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Decoder(name="decoder")(x)


@pytest.mark.parametrize("name", ["maxtext_rules", "maxtext_fp8_full"])
def test_rules_of_maxtext_find_its_layers(page, name):
    args = {"maxtext_rules": ("int8", 2), "maxtext_fp8_full": ["absmax"] * 3}[name]
    model = flax.quantize_model(Transformer(), page[name](*args))
    x = normal((8, 16))
    variables = jax.jit(Transformer().init)(jax.random.key(0), x)
    assert [one.path for one in model.plan(variables, x).quantized()] == [
        "Transformer/decoder/layers/wi",
        "Transformer/decoder/layers/wo",
    ]
    gradients = jax.jit(jax.grad(lambda v: model.apply(v, x).sum()))(variables)
    assert all(leaf.any() for leaf in jax.tree.leaves(gradients))


def test_fnuz_grids_are_those_of_amd(page):
    cfg = page["nanoo_fp8"]()
    assert cfg.fwd.rhs.grid.storage_dtype == "float8_e4m3fnuz"
    assert cfg.dlhs.lhs.grid.storage_dtype == "float8_e5m2fnuz"
    assert cfg.drhs.lhs.calibration == calibration.DelayedScaling(length=1024)


@pytest.mark.code("users")
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["int8", "intmp", "fp8"])
def test_recipes_train_and_are_served(page, recipe):
    tiled = {"__default__": {"w_bits": 4, "tile_size": 8}}
    cfg = page[recipe](*[tiled, "any"] * (recipe == "intmp"))
    layer = nn.Dense(4, dot_general=AqtDotGeneral(cfg))
    x = normal((6, 16))
    variables = jax.jit(layer.init)(jax.random.key(0), x)
    if recipe == "fp8":
        variables = calibrate(layer, variables, [x, x])
    plain = nn.Dense(4)

    @jax.jit
    def outputs(params):
        """Of the layer and of the float one, each with its gradient."""
        rest = {k: v for k, v in variables.items() if k != "params"}
        return [
            jax.value_and_grad(
                lambda p, m=model: jnp.square(m.apply({"params": p, **rest}, x)).sum()
            )(params)
            for model in (layer, plain)
        ]

    (got, gradient), (wanted, exact) = outputs(variables["params"])
    assert abs(got - wanted) <= 0.3 * abs(wanted)
    assert 0 < relative_error(gradient["kernel"], exact["kernel"]) <= 0.3
    apply = jax.jit(layer.apply)
    assert (apply(convert(layer, variables, x), x) == apply(variables, x)).all()


def rows(text, heading):
    """The cells of the table whose head begins so."""
    lines = text[text.index(heading) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


def test_setters_have_a_change_that_is_accepted(page):
    changed = 0
    start = config.fully_quantized(use_fwd_quant=False, use_stochastic_rounding=False)
    noisy = config.fully_quantized(use_fwd_quant=False)
    for _, remedy in rows(PAGE.read_text(), "| AQT | `config.update("):
        changes = {}
        for path, value in re.findall(r'`"([\w.*]+)": (.+?)`', remedy):
            changes[path] = eval(value, {**page, "bound": 1.0, "scale": 0.9})
        if remedy.startswith("none"):
            continue
        assert changes, remedy
        needs_noise = any("noise" in path for path in changes)
        before = noisy if needs_noise else start
        assert config.update(before, changes) != before, remedy
        changed += 1
    assert changed > 10


def test_every_name_of_ours_exists():
    """In whatever is written as `module.name`, here and on the pages beside it."""
    modules = {
        "config": config,
        "numerics": numerics,
        "calibration": calibration,
        "aqtlite": aqtlite,
    }
    text = PAGE.read_text()
    text = text[: text.index("| AQT (`aqt.jax.v2.config`)")] + "".join(
        row[1] for row in rows(text, "| AQT (`aqt")
    )
    for name in ("qwix", "torchao"):
        other = PAGE.with_name(f"coming_from_{name}.md").read_text()
        tables = re.findall(r"^\|(?! ---).*\|\n\| --- ", other, re.M)
        assert tables
        for head in tables:
            text += "".join(row[1] for row in rows(other, head.splitlines()[0]))
    names = re.findall(
        r"(?<![.\w\"])(config|numerics|calibration|aqtlite)\.(\w+)", text
    )
    others = ("flax", "jax", "md")  # A link to a page is no name.
    names = [(module, name) for module, name in names if name not in others]
    assert len(names) > 60
    for module, name in names:
        assert hasattr(modules[module], name), f"{module}.{name}"


def test_presets_for_configs_of_torchao_are_configs():
    text = PAGE.with_name("coming_from_torchao.md").read_text()
    _, of_configs = text.split("## Configs")
    made = []
    for _, ours in rows(of_configs, "| torchao | aqtlite |"):
        for code in re.findall(r"`(config\.(?!Blocks)[\w.]+\(.*?\))`", ours):
            made.append(eval(code, {"config": config}))
    assert len(made) == 10
    assert all(isinstance(one, config.DotGeneral) for one in made)


def test_readme_links_to_it():
    assert "docs/coming_from_aqt.md" in (PAGE.parent.parent / "README.md").read_text()
