"""The masks of the results of each primitive.

An element counts if everything that it is computed from, element by element, in a
window or with weights that are parameters, counts. An element that is reduced from
others, or contracted with weights that depend on tokens, counts if any of them does:
that it leaves out padding, as attention does, is up to the model.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite.program.masking import masks as masks_lib
from aqtlite.program.masking.masks import all_of, any_along, full, placed, without_axes

Found = Sequence[jax.Array | None]
"""A mask for each input or output of an equation."""

Rule = Callable[[Any, Sequence[Any], Found, Sequence[Any]], "list[Any] | None"]
"""Function from an equation, its inputs, their masks, and its outputs to the masks of
the outputs, or None if it cannot follow them."""


def _elementwise(eqn, values, masks, outputs):
    ndim, parts = jnp.ndim(outputs[0]), []
    for mask in masks:
        if mask is not None and mask.ndim not in (0, ndim):
            return None  # A cast to elements of another size.
        parts.append(None if mask is None else mask.reshape(mask.shape or (1,) * ndim))
    return [all_of(parts)]


def _unchanged(eqn, values, masks, outputs):
    return list(masks[: len(outputs)])


def _transpose(eqn, values, masks, outputs):
    return [masks[0].transpose(eqn.params["permutation"])]


def _broadcast_in_dim(eqn, values, masks, outputs):
    axes = eqn.params["broadcast_dimensions"]
    return [placed(masks[0], axes, jnp.ndim(outputs[0]))]


def _reshape(eqn, values, masks, outputs):
    before, after = jnp.shape(values[0]), jnp.shape(outputs[0])
    return [masks_lib.reshaped(masks[0], before, after)]


def _slice(eqn, values, masks, outputs):
    mask, params = masks[0], eqn.params
    strides = params["strides"] or (1,) * mask.ndim
    starts, limits = params["start_indices"], params["limit_indices"]
    for axis, size in enumerate(mask.shape):
        if size != 1:
            cut = starts[axis], limits[axis], strides[axis], axis
            mask = lax.slice_in_dim(mask, *cut)
    return [mask]


def _split(eqn, values, masks, outputs):
    mask, axis = masks[0], eqn.params["axis"]
    if mask.shape[axis] == 1:
        return [mask] * len(outputs)
    return list(lax.split(mask, eqn.params["sizes"], axis))


def _dynamic_slice(eqn, values, masks, outputs):
    mask, starts = masks[0], values[1:]
    if mask is None:
        return None
    sizes = zip(mask.shape, eqn.params["slice_sizes"], strict=True)
    of_mask = [1 if own == 1 else size for own, size in sizes]
    kept = [
        jnp.where(own == 1, 0, i) for own, i in zip(mask.shape, starts, strict=True)
    ]
    return [lax.dynamic_slice(mask, kept, of_mask)]


def _dynamic_update_slice(eqn, values, masks, outputs):
    operand, update, *starts = values
    of_operand = full(masks[0], operand.shape)
    of_update = full(masks[1], update.shape)
    return [lax.dynamic_update_slice(of_operand, of_update, starts)]


def _pad(eqn, values, masks, outputs):
    mask = masks[0]
    if mask is None:
        return None
    padding = eqn.params["padding_config"]
    own = [
        one if size == of_value else (0, 0, 0)
        for one, size, of_value in zip(
            padding, mask.shape, jnp.shape(values[0]), strict=True
        )
    ]
    return [lax.pad(mask, jnp.bool_(True), own)]


def _concatenate(eqn, values, masks, outputs):
    axis = eqn.params["dimension"]
    if all(mask is masks[0] for mask in masks) and masks[0].shape[axis] == 1:
        return [masks[0]]
    parts = [
        jnp.ones((1,) * x.ndim, bool) if mask is None else mask
        for x, mask in zip(values, masks, strict=True)
    ]
    shape = list(jnp.broadcast_shapes(*(_without(m.shape, axis) for m in parts)))
    for i, (x, mask) in enumerate(zip(values, parts, strict=True)):
        shape[axis] = x.shape[axis]
        parts[i] = jnp.broadcast_to(mask, shape)
    return [jnp.concatenate(parts, axis)]


def _stack(eqn, values, masks, outputs):
    axis = eqn.params["axis"]
    if all(mask is masks[0] for mask in masks):
        return [jnp.expand_dims(masks[0], axis)]
    parts = [
        jnp.ones((1,) * jnp.ndim(values[0]), bool) if m is None else m for m in masks
    ]
    return [jnp.stack(jnp.broadcast_arrays(*parts), axis)]


def _unstack(eqn, values, masks, outputs):
    mask, axis = masks[0], eqn.params["axis"]
    if mask.shape[axis] == 1:
        return [mask.squeeze(axis)] * len(outputs)
    return list(jnp.unstack(mask, axis=axis))


def _tile(eqn, values, masks, outputs):
    reps = eqn.params["reps"]
    own = [1 if size == 1 else n for n, size in zip(reps, masks[0].shape, strict=True)]
    return [jnp.tile(masks[0], own)]


def _without(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], 1, *shape[axis + 1 :])


def _rev(eqn, values, masks, outputs):
    return [lax.rev(masks[0], eqn.params["dimensions"])]


def _reduce(eqn, values, masks, outputs):
    params = eqn.params
    axes = params["axes"] if "axes" in params else params["dimensions"]
    inputs = [without_axes(m, axes) for m in masks if m is not None and m.ndim]
    return [all_of(inputs)] * len(outputs)


def _reduce_window(eqn, values, masks, outputs):
    params = eqn.params
    return [
        _of_windows(
            masks[0],
            params["window_dimensions"],
            params["window_strides"],
            params["padding"],
            params["base_dilation"],
            params["window_dilation"],
        )
    ]


def _of_windows(mask, window, strides, padding, base_dilation, window_dilation):
    """Returns where all elements of a window count; padding with zeros counts."""
    varies = [size != 1 for size in mask.shape]

    def where_it_varies(given: Any, other: Any) -> list[Any]:
        return [one if v else other for one, v in zip(given, varies, strict=True)]

    ones = (1,) * mask.ndim
    found = lax.reduce_window(
        mask.astype(jnp.int32),
        jnp.int32(1),
        lax.min,
        where_it_varies(window, 1),
        where_it_varies(strides or ones, 1),
        where_it_varies(padding, (0, 0)),
        where_it_varies(base_dilation or ones, 1),
        where_it_varies(window_dilation or ones, 1),
    )
    return found.astype(bool)


def _conv_general_dilated(eqn, values, masks, outputs):
    params, (lhs, rhs) = eqn.params, masks
    if rhs is not None or params["batch_group_count"] > 1:
        return None
    dims = params["dimension_numbers"]
    mask = lhs.transpose(dims.lhs_spec)
    if mask.shape[1] != 1:
        mask = jnp.all(mask, 1, keepdims=True)
    kernel = values[1].transpose(dims.rhs_spec).shape[2:]
    found = _of_windows(
        mask,
        (1, 1, *kernel),
        (1, 1, *params["window_strides"]),
        ((0, 0), (0, 0), *params["padding"]),
        (1, 1, *params["lhs_dilation"]),
        (1, 1, *params["rhs_dilation"]),
    )
    return [placed(found, dims.out_spec, found.ndim)]


def _dot_general(eqn, values, masks, outputs):
    contracting, batch = eqn.params["dimension_numbers"]
    ndim, number = jnp.ndim(outputs[0]), len(batch[0])
    parts, place = [], number
    for mask, summed, shared, x in zip(masks, contracting, batch, values, strict=True):
        kept = [i for i in range(jnp.ndim(x)) if i not in (*summed, *shared)]
        places = (*range(number), *range(place, place + len(kept)))
        place += len(kept)
        if mask is not None:
            mask = any_along(mask, summed).transpose((*shared, *kept, *summed))
            mask = mask.reshape(mask.shape[: mask.ndim - len(summed)])
            parts.append(placed(mask, places, ndim))
    varies = [
        [mask is not None and mask.shape[axis] != 1 for axis in summed]
        for mask, summed in zip(masks, contracting, strict=True)
    ]
    if not any(map(any, varies)):
        return [all_of(parts)]
    are_weighed = any(map(all, zip(*varies, strict=True)))
    parts.append(_of_products(eqn, values, masks, are_weighed=are_weighed))
    return [all_of(parts)]


def _of_products(eqn, values, masks, *, are_weighed):
    """Returns which sums of products count, by the products that are not zero.

    Weights that are parameters cannot leave out padding: all products have to count.
    Of weights that depend on tokens, as those of attention, one is enough: if padding
    has a share in the others, that is up to the model.
    """

    def number_of(operands):
        lhs, rhs = (x.astype(jnp.float32) for x in operands)
        return lax.dot_general(lhs, rhs, eqn.params["dimension_numbers"])

    nonzero = [x != 0 for x in values]
    counted = [x if m is None else x & m for x, m in zip(nonzero, masks, strict=True)]
    number = number_of(counted)
    has_all = number == number_of(nonzero)
    return has_all | (number > 0) if are_weighed else has_all


def _ragged_dot_general(eqn, values, masks, outputs):
    dims = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    of_rows, of_weights, *_ = masks
    if of_weights is not None or dims != (((1,), (1,)), ((), ())):
        return None
    return None if of_rows is None else [any_along(of_rows, (1,))]


def _gather(eqn, values, masks, outputs):
    (operand, indices), (of_operand, of_indices) = values, masks
    dims, ndim = eqn.params["dimension_numbers"], jnp.ndim(outputs[0])
    parts = []
    if of_operand is not None:
        parts.append(
            lax.gather(
                full(of_operand, operand.shape),
                indices,
                dims,
                eqn.params["slice_sizes"],
                mode=eqn.params["mode"],
                fill_value=True,
            )
        )
    if of_indices is not None:
        places = [axis for axis in range(ndim) if axis not in dims.offset_dims]
        parts.append(placed(jnp.all(of_indices, -1), places, ndim))
    return [all_of(parts)]


def _scatter(eqn, values, masks, outputs):
    operand, indices, updates = values
    of_operand, of_indices, of_updates = masks
    dims, ndim = eqn.params["dimension_numbers"], jnp.ndim(updates)
    if of_indices is not None:
        places = [axis for axis in range(ndim) if axis not in dims.update_window_dims]
        of_indices = placed(jnp.all(of_indices, -1), places, ndim)
    new = full(all_of([of_updates, of_indices]), updates.shape)
    # An update by addition, or another operation, leaves what was there.
    is_set = eqn.primitive.name == "scatter"
    write = lax.scatter if is_set else lax.scatter_min
    mode = eqn.params["mode"]
    counts = (full(x, s.shape) for x, s in ((of_operand, operand), (new, updates)))
    before, after = (x.astype(jnp.int32) for x in counts)
    return [write(before, indices, after, dims, mode=mode).astype(bool)]


def _sort(eqn, values, masks, outputs):
    params = eqn.params
    # An element stands where the key of its token does.
    of_keys = all_of(masks[: params["num_keys"]])
    own = [
        full(all_of([of_keys, m]), x.shape) for m, x in zip(masks, values, strict=True)
    ]
    found = lax.sort(
        (*values, *own), params["dimension"], params["is_stable"], params["num_keys"]
    )
    return list(found[len(values) :])


def _top_k(eqn, values, masks, outputs):
    if eqn.params.get("axis", -1) not in (-1, jnp.ndim(values[0]) - 1):
        return None
    mask = masks[0]
    if mask.shape[-1] != 1:
        mask = jnp.take_along_axis(full(mask, values[0].shape), outputs[1], -1)
    return [mask, mask]


def _each(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: Mapping[str, Rule] = {
    **_each(
        "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e "
        "bessel_i1e bitcast_convert_type cbrt ceil clamp clz complex conj "
        "convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv erfc exp "
        "exp2 expm1 floor ge gt igamma igammac imag integer_pow is_finite le le_to "
        "lgamma log log1p logistic lt lt_to max min mul name ne neg nextafter not or "
        "polygamma population_count pow pvary real reduce_precision rem round rsqrt "
        "select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh "
        "sqrt square stop_gradient sub tan tanh xor zeta",
        _elementwise,
    ),
    **_each(
        "cumlogsumexp cummax cummin cumprod cumsum device_put layout_constraint "
        "optimization_barrier reshard sharding_constraint",
        _unchanged,
    ),
    **_each(
        "argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod "
        "reduce_sum reduce_xor",
        _reduce,
    ),
    **_each("reduce_window_max reduce_window_min reduce_window_sum", _reduce_window),
    **_each(
        "scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub", _scatter
    ),
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _concatenate,
    "conv_general_dilated": _conv_general_dilated,
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "pad": _pad,
    "ragged_dot_general": _ragged_dot_general,
    "reshape": _reshape,
    "rev": _rev,
    "slice": _slice,
    "sort": _sort,
    "split": _split,
    "squeeze": _reshape,
    "stack": _stack,
    "tile": _tile,
    "top_k": _top_k,
    "transpose": _transpose,
    "unstack": _unstack,
}
"""Rules by name of the primitive. They get at least one mask."""
