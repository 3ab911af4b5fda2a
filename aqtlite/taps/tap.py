"""A function together with what its quantized contractions note.

The function is traced while contractions note what their rounding does
(`contraction.tapped`), and its program evaluated with these notes as further outputs:
through loops, branches, `jax.vmap`, `jax.checkpoint` and differentiation, for functions
injected into layers and for rules. Nothing is kept in variables, and a program without
taps computes nothing for them.
"""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend import core

from aqtlite import errors
from aqtlite.contraction import contract, differentiation, operand_scalars, tapped
from aqtlite.jaxpr import module_scopes, rewriting, sites
from aqtlite.jaxpr.replacement import Replacement
from aqtlite.jaxpr.sites import Site
from aqtlite.operations import Operation
from aqtlite.program.modules import flax_models
from aqtlite.program.naming import numbered
from aqtlite.qtensor.qtensor import Operand, dequantized
from aqtlite.taps import pure
from aqtlite.taps.records import ResultError, TappedOperand, TappedResult, Taps

T = TypeVar("T")

_BARRIER = "optimization_barrier"
"""Name of the primitive whose equations hold notes."""

_AGAIN = "rematted_computation"
"""The scope in which JAX computes again what `jax.checkpoint` has dropped."""


def tap(fn: Callable[..., T]) -> Callable[..., tuple[T, Taps]]:
    """Returns a function that also returns what its quantized contractions do.

    Of every operand that is quantized in a call of `fn`, forward and backward: the
    signal-to-noise ratio of its rounding, the share that is clipped, its range, and
    the channel that stands out. Give it a training step, and call the result in its
    place every few steps. The step itself stays as it is.

    >>> from aqtlite import config, make_dot_general
    >>> dot_general = make_dot_general(config.fully_quantized())
    >>> def loss(w, x):
    ...     with jax.named_scope("layer"):
    ...         return dot_general(x, w, (((1,), (0,)), ((), ()))).sum()
    >>> w, x = jnp.linspace(-1, 1, 32).reshape(8, 4), jnp.ones((4, 8))
    >>> gradient, taps = tap(jax.grad(loss))(w, x)
    >>> for one in taps.operands:
    ...     print(one.path, one.operand, one.grid, one.shape)
    layer fwd.lhs int8 (4, 8)
    layer fwd.rhs int8 (8, 4)
    layer drhs.lhs int8 (4, 4)
    >>> 40 < taps.operands[1].snr < 60
    Array(True, dtype=bool)

    Args:
        fn: function of pytrees of arrays, which may differentiate, such as a training
            step, ``jax.value_and_grad(loss)`` or ``model.apply``. It may take NNX
            models and optimizers, and update them.

    Returns:
        A function with the arguments of `fn` that returns its result and the `Taps`.
        It is compiled for each shape, and may be called inside of `jax.jit`,
        `jax.lax.cond` and loops. Contractions in conditions of while loops and in
        `jax.shard_map` are not seen; of a while loop, the last step is.

    Raises:
        TypeError: if `fn` is not callable, or a model.
        ValueError: when called, if `fn` quantizes nothing that is seen.
    """
    return _tapped(fn, "operands")


def tap_against_float(fn: Callable[..., T]) -> Callable[..., tuple[T, Taps]]:
    """Returns a function as `tap`, which also compares results with those of floats.

    Each contraction, forward and backward, is contracted in float32 as well, from the
    same operands, and all of `fn` is run with its contractions in float. Given a
    function that returns gradients, ``taps.errors`` has the error of each gradient. It
    takes a few times as long as `fn`: call it when something is wrong.

    >>> from aqtlite import config, make_dot_general
    >>> dot_general = make_dot_general(config.fully_quantized())
    >>> def loss(w, x):
    ...     return jnp.square(dot_general(x, w, (((1,), (0,)), ((), ())))).sum()
    >>> w = jnp.linspace(-1, 1, 64).reshape(16, 4)
    >>> x = jnp.cos(jnp.arange(128.0)).reshape(8, 16)
    >>> gradient, taps = tap_against_float(jax.grad(loss))(w, x)
    >>> [one.contraction for one in taps.results]
    ['fwd', 'drhs']
    >>> [error] = taps.errors
    >>> bool(25 < error.snr < 60)
    True

    Args:
        fn: as for `tap`.

    Returns:
        As for `tap`; `Taps.results` and `Taps.errors` are not empty.

    Raises:
        TypeError: if `fn` is not callable, or a model.
        ValueError: when called, if `fn` quantizes nothing that is seen.
    """
    return _tapped(fn, "outputs")


def _tapped(fn: Callable[..., T], what: tapped.What) -> Callable[..., tuple[T, Taps]]:
    if flax_models.is_nnx(fn) or (hasattr(fn, "init") and hasattr(fn, "apply")):
        raise TypeError(
            f"tap takes a function, got the model {type(fn).__name__}: give a training "
            "step, or a function that calls the model"
        )
    if not callable(fn):
        raise TypeError(f"tap takes a function, got {errors.brief(fn)}")

    def run(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Taps]:
        return _run(lambda args, kwargs: function(*args, **kwargs), args, kwargs, what)

    @functools.wraps(fn)
    def with_taps(*args: Any, **kwargs: Any) -> tuple[T, Taps]:
        found: tuple[T, Taps] = compiled(*args, **kwargs)
        return found

    compiled = pure.compiled(fn, run)
    return with_taps


def _run(
    function: Callable[..., Any], args: Any, kwargs: Any, what: tapped.What
) -> tuple[Any, Taps]:
    with tapped.tapping(what):
        traced = flax_models.trace(function, (args, kwargs))
    found = _noted(traced.jaxpr)
    if not found:
        raise ValueError(
            "nothing to tap: the function quantizes no operand, or only inside of "
            "jax.shard_map or of conditions of while loops"
        )
    replacements = {site.location: _output(site) for site, _ in found}
    values = traced.values((args, kwargs))
    outputs, aux = rewriting.evaluate(traced.jaxpr, values, replacements)
    out = traced.result(outputs)
    taps = _taps([(site, note, aux[site.location]) for site, note in found])
    if what == "operands":
        return out, taps
    with contract.replaced_by(_in_float):
        # Another function: JAX keeps traces by function.
        exact = (lambda args, kwargs: function(args, kwargs))(args, kwargs)
    return out, taps.with_errors(_errors(exact, out))


def _noted(closed: core.ClosedJaxpr) -> list[tuple[Site, tapped.Note]]:
    """Returns the equations that hold notes, with what they hold, in program order."""
    found = sites.find(closed, names=frozenset({_BARRIER})).contractions
    notes = [(site, tapped.note_of(site.scope.path)) for site in found]
    seen = [(x, note) for x, note in notes if note is not None and x.obstacle is None]
    first = {(_path(x), note) for x, note in seen if not _is_again(x, note)}
    return [
        (x, note)
        for x, note in seen
        if not (_is_again(x, note) and (_path(x), note) in first)
    ]


def _is_again(site: Site, note: tapped.Note) -> bool:
    """Whether a forward contraction is computed in a gradient, as for remat."""
    is_of_gradient = "transpose" in site.scope.transformations
    names = site.scope.path.split("/")
    return note.path == "fwd" and (is_of_gradient or _AGAIN in names)


def _path(site: Site) -> str:
    planned = tapped.planned_of(site.scope.path)
    if planned is not None and planned.path is not None:
        return planned.path
    scope = module_scopes.resolved(tapped.without_planned(site.scope.path)).path
    names = scope.split("/")
    outer = names[: names.index(differentiation.SCOPE)]
    return "/".join(name for name in outer if name != _AGAIN)


def _output(site: Site) -> Replacement:
    """Returns a replacement that computes the same, with what it holds as outputs."""
    _, *values = site.eqn.outvars
    lengths = site.lengths

    def function(inputs: Sequence[Any], given: Any) -> tuple[Any, Any]:
        del given
        outputs = jax.lax.optimization_barrier(tuple(inputs))
        return outputs, tuple(outputs[1:])

    # What a branch that is not taken returns.
    fill = tuple(
        jnp.full((*lengths, *var.aval.shape), _missing(var.aval.dtype), var.aval.dtype)
        for var in values
    )
    return Replacement(function, fill, has_aux=True, per_step=(True,) * len(lengths))


def _missing(dtype: Any) -> float | int:
    return float("nan") if jnp.issubdtype(dtype, jnp.floating) else -1


def _taps(found: Sequence[tuple[Site, tapped.Note, Sequence[Any]]]) -> Taps:
    operands, results = list[TappedOperand](), list[TappedResult]()
    for path, site, note, values in _named(found):
        planned = tapped.planned_of(site.scope.path)
        is_of_activations = planned is not None and planned.is_of_activations
        count = len(operand_scalars.Scalars._fields)
        for place, noted in enumerate(note.operands):
            scalars = operand_scalars.Scalars(
                *values[count * place : count * (place + 1)]
            )
            operands.append(
                TappedOperand(
                    path=path,
                    operand=f"{note.path}.{noted.side}",
                    shape=noted.shape,
                    shapes=note.shapes,
                    cfg=noted.cfg,
                    contracting=noted.contracting,
                    channels=noted.channels,
                    can_smooth=noted.can_smooth and not is_of_activations,
                    is_of_activations=is_of_activations,
                    can_rotate=noted.can_rotate,
                    by_rule=planned is not None and planned.path is not None,
                    has_batch=noted.has_batch,
                    **scalars._asdict(),
                )
            )
        if note.has_output:
            results.append(
                TappedResult(path=path, contraction=note.path, snr=values[-1])
            )
    return Taps(tuple(operands), tuple(results))


def _named(
    found: Sequence[tuple[Site, tapped.Note, Sequence[Any]]],
) -> list[tuple[str, Site, tapped.Note, Sequence[Any]]]:
    """Returns notes with paths; of equal ones, gradients come in reverse order."""
    alike = collections.defaultdict(list)
    for place, (site, note, _) in enumerate(found):
        sides = tuple(one.side for one in note.operands)
        alike[_path(site), note.path, sides].append(place)
    names = dict[int, str]()
    for (path, contraction, _), places in alike.items():
        ordered = sorted(places, reverse=contraction != "fwd")
        same = numbered([path] * len(ordered))
        names.update(zip(ordered, same, strict=True))
    order = sorted(range(len(found)), key=lambda i: found[i][1].path != "fwd")
    return [(names[i], *found[i]) for i in order]


def _in_float(
    cfg: Any, operation: Operation, lhs: Operand, rhs: Operand, out_dtype: Any
) -> jax.Array:
    """Contracts in float, in place of a quantized contraction."""
    del cfg
    left, right = map(dequantized, (lhs, rhs))
    precision = jax.lax.Precision.HIGHEST
    return operation.in_float(left, right, precision, out_dtype, None)


def _errors(exact: Any, out: Any) -> tuple[ResultError, ...]:
    """Returns the error of each floating leaf of a result."""
    found = []
    others = jax.tree.leaves(out)
    for (path, one), other in zip(
        jax.tree.leaves_with_path(exact), others, strict=True
    ):
        if not jnp.issubdtype(jnp.result_type(one), jnp.floating):
            continue
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        left, right = (jnp.asarray(x, jnp.float32) for x in (one, other))
        found.append(ResultError(path=name, snr=operand_scalars.decibels(left, right)))
    return tuple(found)
