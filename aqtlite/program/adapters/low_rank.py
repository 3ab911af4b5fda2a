"""Low-rank adapters of weights: their shapes, initial values and products.

The weight of a contraction has contracted axes, axes of a batch (or groups), and
others. `lora_a` has the first two and a last axis of the rank; `lora_b` has the batch,
the rank and the others. Of a convolution, `lora_a` is a kernel with as many output
features as the rank, and `lora_b` a matrix.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite import config, errors
from aqtlite.contraction import refused_gradient
from aqtlite.operations import DotGeneral
from aqtlite.program import keys
from aqtlite.program.adapters import magnitude
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization.quantize import quantize
from aqtlite.quantization.states.statistics import States

if TYPE_CHECKING:
    from aqtlite.program.planned import PlannedContraction

A, B = "lora_a", "lora_b"
"""Names of the parameters, float32."""

_KEY = "key"
"""Name of the data of a key for dropout, beside the parameters of a call."""

Shape = tuple[int, ...]
WeightAxes = tuple[int | None, ...]


def check(
    one: "PlannedContraction", cfg: config.DotGeneral | None, obstacle: str | None
) -> None:
    """Checks that the weight of a contraction can have an adapter.

    Args:
        one: a contraction with exactly one weight.
        cfg: the config of its rule.
        obstacle: reason why the contraction cannot be replaced, if any.

    Raises:
        ValueError: if it cannot.
    """
    params = one.site.eqn.params
    grouped = ("feature_group_count", "batch_group_count")
    why = obstacle
    if (one.lhs, one.rhs)[one.index("rhs")].kind != "weight":
        why = f"the weight of a {one.op} has to be its second operand"
    elif any(params.get(name, 1) != 1 for name in grouped):
        why = "it is a convolution of groups of features"
    elif magnitude.has_one(one) and cfg and (cfg.fwd.smoothing or cfg.fwd.rotation):
        why = "magnitudes (config.Dora) take weights that are not smoothed or rotated"
    if why is not None:
        raise ValueError(
            f"its weight cannot have an adapter: {why}. Name it in a rule before, "
            "without an adapter"
        )


def axes(one: "PlannedContraction") -> tuple[WeightAxes, WeightAxes]:
    """Returns the axes of the weight that `lora_a` and `lora_b` have; None: the rank.

    For one step of the scans around.
    """
    operation, _, weight = one.types()
    if one.op == "ragged_dot":
        return (0, 1, None), (0, None, 2)
    if not isinstance(operation, DotGeneral):
        features = _conv_spec(one).rhs_spec[0]
        kernel = (None if i == features else i for i in range(weight.ndim))
        return tuple(kernel), (None, features)
    (_, contracting), (_, batch) = operation.dims
    remaining = operation.axes("rhs").remaining
    return (*batch, *contracting, None), (*batch, None, *remaining)


def shapes(one: "PlannedContraction") -> tuple[Shape, Shape]:
    """Returns the shapes of `lora_a` and `lora_b`, for one step of the scans around."""
    assert one.adapter is not None
    _, _, weight = one.types()
    rank = one.adapter.rank
    a, b = (
        tuple(rank if axis is None else weight.shape[axis] for axis in of_one)
        for of_one in axes(one)
    )
    return a, b


def names(
    one: "PlannedContraction", of_weight: Sequence[Any]
) -> dict[str, tuple[Any, ...]]:
    """Returns the names of the axes of the parameters: the weight's, and none of the
    rank.

    Args:
        one: the contraction.
        of_weight: names of the weight's axes, after those of the scans around with a
            weight for each step.
    """
    _, _, weight = one.types()
    count, steps = len(of_weight) - weight.ndim, len(_steps(one))
    leading = of_weight[:count] if count == steps else (None,) * steps
    a, b = (
        (*leading, *(None if axis is None else of_weight[count + axis] for axis in of))
        for of in axes(one)
    )
    found = {A: a, B: b}
    if magnitude.has_one(one):
        place = len(leading) + axes(one)[1].index(None)
        found[magnitude.MAGNITUDE] = (*b[:place], *b[place + 1 :])
    return found


def init(one: "PlannedContraction") -> dict[str, jax.Array]:
    """Returns the initial parameters, stacked along the scans around a contraction."""
    assert one.adapter is not None
    a_shape, b_shape = shapes(one)
    _, _, weight = one.types()
    # What one output is a sum of: all of the weight but other outputs, and the batch.
    fan_in = math.prod(weight.shape) * one.adapter.rank // math.prod(b_shape)
    key = keys.folded(jax.random.key(one.adapter.seed), one)
    bound, steps = 1 / math.sqrt(fan_in), _steps(one)
    return {
        A: jax.random.uniform(
            key, (*steps, *a_shape), jnp.float32, minval=-bound, maxval=bound
        ),
        B: jnp.zeros((*steps, *b_shape), jnp.float32),
    }


def with_key(one: "PlannedContraction", states: States, key: Any) -> States:
    """Returns states with a key for the dropout of a contraction's adapter.

    Args:
        one: the contraction.
        states: its states.
        key: a key of the call; None drops nothing.
    """
    if key is None or one.adapter is None or not one.adapter.dropout:
        return states
    data = jax.random.key_data(keys.of_steps(key, one, _steps(one)))
    return states._replace(adapter={**states.adapter, _KEY: data})


def parameters(one: "PlannedContraction", states: States) -> Mapping[str, Any]:
    """Returns the parameters of a contraction's adapter; raises if there are none."""
    if not states.adapter:
        raise ValueError(
            f"the adapter of {errors.quoted(one.path)} has no parameters: make them "
            "with init_adapters(variables, *args) of a Linen model, "
            "aqtlite.flax.nnx.init_state(model, *args), or init_state(*args) of a "
            "function"
        )
    return states.adapter


def beside(
    one: "PlannedContraction",
    contract: Callable[[Sequence[Any]], list[jax.Array]],
    operands: Sequence[Any],
    states: States,
) -> list[jax.Array]:
    """Evaluates a contraction of a frozen weight, and adds its adapter's product.

    Args:
        one: the contraction.
        contract: function from operands to its result.
        operands: result of `one.in_order`; the weight may be a `QTensor`.
        states: states with the parameters of the adapter.

    Raises:
        ValueError: if there are no parameters.
        TypeError: if the weight is differentiated.
    """
    assert one.adapter is not None
    given = dict(parameters(one, states))
    x, weight, *others = operands
    if not isinstance(weight, QTensor):
        weight = _frozen(one, weight)
    (out,) = contract([x, weight, *others])
    key = given.pop(_KEY, None)
    if key is not None:
        x = _dropped(x, jax.random.wrap_key_data(key), one.adapter.dropout)
    a, b = (given[name].astype(x.dtype) for name in (A, B))
    added = _product(one, x, a, b, others)
    wide = np.promote_types(out.dtype, np.float32)
    total = out.astype(wide) + one.adapter.scale * added.astype(wide)
    if magnitude.has_one(one):
        update = product_of(one)(given[A], given[B])
        base = _decoded(one, weight).astype(jnp.float32)
        norm = magnitude.norm(axes(one), base + update)
        factor = given[magnitude.MAGNITUDE] / lax.stop_gradient(norm)
        total *= magnitude.of_results(one, factor, x, others).astype(wide)
    return [total.astype(out.dtype)]


def _product(
    one: "PlannedContraction", x: Any, a: Any, b: Any, others: Sequence[Any]
) -> jax.Array:
    """Returns ``x A B``, with the axes of the contraction's result."""
    params = one.site.eqn.params
    if one.op == "ragged_dot":
        (sizes,) = others
        return lax.ragged_dot(lax.ragged_dot(x, a, sizes), b, sizes)
    operation, _, _ = one.types()
    precision = params["precision"]
    if not isinstance(operation, DotGeneral):
        spec = _conv_spec(one)
        names = "window_strides", "padding", "lhs_dilation", "rhs_dilation"
        given = {name: params[name] for name in names}
        inner = lax.conv_general_dilated(
            x, a, **given, dimension_numbers=spec, precision=precision
        )
        features = spec.out_spec[1]
        out = lax.dot_general(inner, b, (((features,), (0,)), ((), ())), precision)
        return jnp.moveaxis(out, -1, features)
    (contracting, _), (batch, _) = operation.dims
    front = tuple(range(len(batch)))
    inputs = tuple(range(len(batch), len(batch) + len(contracting)))
    inner = lax.dot_general(x, a, ((contracting, inputs), (batch, front)), precision)
    last = (inner.ndim - 1,), (len(batch),)
    out = lax.dot_general(inner, b, (last, (front, front)), precision)
    order = one.order(x.ndim)
    out = out if order is None else out.transpose(order)
    return out.reshape(one.site.eqn.outvars[0].aval.shape)


def product_of(one: "PlannedContraction") -> Callable[[Any, Any], jax.Array]:
    """Returns the function from the parameters of an adapter to what it adds to W.

    In the shape of the weight, for one step of the scans around; float32.
    """
    assert one.adapter is not None
    scale = np.float32(one.adapter.scale)
    operation, _, _ = one.types()

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        exact = lax.Precision.HIGHEST
        if one.op == "ragged_dot":
            return scale * jnp.matmul(a, b, precision=exact)
        if not isinstance(operation, DotGeneral):
            features = _conv_spec(one).rhs_spec[0]
            kernel = jnp.tensordot(a, b, ((features,), (0,)), precision=exact)
            return scale * jnp.moveaxis(kernel, -1, features)
        (_, contracting), (_, batch) = operation.dims
        front, last = tuple(range(len(batch))), a.ndim - 1
        dims = ((last,), (len(batch),)), (front, front)
        made = (*batch, *contracting, *operation.axes("rhs").remaining)
        kernel = lax.dot_general(a, b, dims, exact)
        return scale * kernel.transpose(np.argsort(made))

    return product


def _decoded(one: "PlannedContraction", weight: Any) -> jax.Array:
    """Returns a weight as its contraction rounds it, in float."""
    if isinstance(weight, QTensor):
        return weight.dequant()
    tensor = one.cfg.fwd.rhs
    if not tensor.is_quantized or tensor.calibration.needs_state:
        return weight
    operation, _, _ = one.types()
    found = quantize(weight, tensor.to_nearest(), operation.axes("rhs").contracting)
    return found.dequant()


def merged_by(
    one: "PlannedContraction",
) -> Callable[[Any, Mapping[str, Any]], jax.Array]:
    """Returns the function from a weight and its adapter's parameters to their sum.

    For one step of the scans around; float32.
    """

    def merged(w: jax.Array, adapter: Mapping[str, Any]) -> jax.Array:
        total = w.astype(jnp.float32) + product_of(one)(adapter[A], adapter[B])
        if not magnitude.has_one(one):
            return total
        factor = adapter[magnitude.MAGNITUDE] / magnitude.norm(axes(one), total)
        return total * magnitude.of_weight(axes(one), factor, total.ndim)

    return merged


def _frozen(one: "PlannedContraction", weight: jax.Array) -> jax.Array:
    """Returns a float weight that refuses gradients."""
    names = " and ".join(map(repr, one.parameters)) or "the weight"
    message = (
        f"a gradient was asked with respect to {names}, which is frozen: it has an "
        f"adapter in {errors.quoted(one.path)}. Differentiate with respect to adapters "
        "alone: in Linen the result of aqtlite.flax.adapters_of(variables), in NNX "
        "nnx.DiffState(0, nnx.LoRAParam), of a function its state"
    )
    return refused_gradient.refused(lax.stop_gradient(weight), weight, message)


def _dropped(x: jax.Array, key: jax.Array, rate: float) -> jax.Array:
    is_kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(is_kept, x / (1 - rate), jnp.zeros_like(x))


def _steps(one: "PlannedContraction") -> Shape:
    """Returns the lengths of the scans around with adapters for each step."""
    return tuple(itertools.compress(one.site.lengths, one.site.per_step))


def _conv_spec(one: "PlannedContraction") -> Any:
    return one.site.eqn.params["dimension_numbers"]
