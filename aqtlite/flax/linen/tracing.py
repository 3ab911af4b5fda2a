"""Traces of the calls of a Linen model."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import linen as nn

from aqtlite.flax.call import Call
from aqtlite.flax.linen import recording
from aqtlite.flax.linen.frozen_kernel import FrozenKernel
from aqtlite.flax.linen.parameters import buffers_of, parameters_of
from aqtlite.jaxpr import tracing
from aqtlite.program.serving import uses
from aqtlite.program.serving.call_site import COLLECTION
from aqtlite.program.serving.contraction import Recorder
from aqtlite.program.serving.model import CallTrace, Model, Parameter
from aqtlite.program.serving.placeholder import Placeholder


class LinenModel(Model):
    """A Linen module with its variables, or their shapes, and its calls."""

    def __init__(
        self, module: nn.Module, variables: Mapping[str, Any], calls: Sequence[Call]
    ):
        self._module = module
        self._variables = variables
        self._calls = calls
        self.parameters = parameters_of(variables["params"])
        self.num_calls = len(calls)
        self.uses_of_statistics = uses.Uses()

    def trace(
        self,
        call: int,
        recorder: Recorder,
        frozen: Mapping[Parameter, Placeholder],
    ) -> CallTrace:
        kwargs = dict(self._calls[call].kwargs)
        mutable = mutable_collections(kwargs.pop("mutable", False))

        def apply(params, buffers, call_args, call_kwargs):
            out, mutated = self._module.apply(
                {"params": params, **buffers},
                *call_args,
                mutable=[*mutable, COLLECTION],
                **call_kwargs,
            )
            mutated = dict(mutated)
            recorded = mutated.pop(COLLECTION, {})
            leaves = jax.tree.leaves((out, mutated))
            return [x for x in leaves if tracing.is_array(x)], recorded

        params = with_frozen_kernels(self._variables["params"], frozen)
        buffers = {k: v for k, v in self._variables.items() if k != "params"}
        args = (params, buffers, self._calls[call].args, kwargs)
        noted = uses.noted_in(self.uses_of_statistics)
        with recording.recorded_by(recorder), noted:
            traced = tracing.trace(apply, args)
        params_in, buffers_in, _, _ = traced.inputs
        _, recorded = traced.outputs
        kept = [parameter for parameter in self.parameters if parameter not in frozen]
        return CallTrace(
            traced.jaxpr,
            dict(zip(jax.tree.leaves(params_in), kept, strict=True)),
            {
                i: buffer
                for i, buffer in zip(
                    _leaves(buffers_in), buffers_of(self._variables), strict=True
                )
                if i is not None
            },
            tuple(recording.recorded_nodes(recorded)),
        )


def _leaves(tree: Any) -> list[Any]:
    """Returns the leaves of a tree, of which one may be None."""
    return jax.tree.leaves(tree, is_leaf=_is_none)


def _is_none(x: Any) -> bool:
    return x is None


def with_frozen_kernels(params: Any, frozen: Mapping[Parameter, Placeholder]) -> Any:
    """Returns the parameters with a `FrozenKernel` in place of those that are frozen.

    Args:
        params: the parameters, boxed or not; a box is replaced with what is in it.
        frozen: the static descriptions of those that are frozen.
    """
    kernels = {parameter.key_path: one for parameter, one in frozen.items()}

    def replace(path: tuple[Any, ...], node: Any) -> Any:
        for below, _ in jax.tree_util.tree_flatten_with_path(node)[0]:
            one = kernels.get((*path, *below))
            if one is not None:
                return FrozenKernel(
                    one.shape, one.dtype, one.number, one.sliced, one.spec
                )
        return node

    return jax.tree_util.tree_map_with_path(
        replace, params, is_leaf=nn.meta.is_axis_metadata
    )


def mutable_collections(mutable: Any) -> list[str]:
    """Returns the names of collections that a call changes, as `apply` takes them.

    Raises:
        TypeError: if they are no names.
        ValueError: if all collections are asked for.
    """
    if isinstance(mutable, str):
        return [mutable]
    if isinstance(mutable, bool):
        if mutable:
            raise ValueError(
                "convert does not support mutable=True; name the collections that the "
                "model changes in serving, such as mutable=['cache']"
            )
        return []
    if not isinstance(mutable, list | tuple | set | frozenset):
        raise TypeError(
            "convert takes mutable= as a name or a list of names of collections, got "
            f"{mutable!r}"
        )
    return list(mutable)
