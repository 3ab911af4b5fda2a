"""The quantized contractions to inject into NNX layers, and an embedding for them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from aqtlite import config, errors, operations
from aqtlite.contraction import einsum_path
from aqtlite.contraction.contract import Options, as_operands, contract, is_product
from aqtlite.contraction.einsum import as_dot_general
from aqtlite.contraction.einsum import as_operands as as_operands_of_einsum
from aqtlite.contraction.einsum_path import Step
from aqtlite.flax import attention
from aqtlite.flax.injectable import check_equation, injectable
from aqtlite.operations import Operation
from aqtlite.program import injected
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization.states.state_collections import collections_of


@dataclasses.dataclass(frozen=True)
class Injected:
    """Base of quantized contractions for NNX layers."""

    cfg: config.DotGeneral | None
    """Config of the quantization; None contracts exactly as `jax.lax` does."""

    def __post_init__(self) -> None:
        cls = type(self).__name__
        if self.cfg is not None and not isinstance(self.cfg, config.DotGeneral):
            raise TypeError(
                f"{cls} takes a config.DotGeneral or None, got "
                f"{errors.brief(self.cfg)}; presets such as "
                "config.fully_quantized() make one"
            )
        if self.cfg is not None and self.cfg.out.is_quantized:
            raise ValueError(
                f"{cls}.cfg.out quantizes results, which NNX layers take as arrays: "
                "leave out=config.Tensor()"
            )

    def run(
        self, operation: Operation, lhs: Any, rhs: Any, options: Options
    ) -> jax.Array | QTensor:
        """Contracts; in a quantized model, contracts floats and marks the contraction.

        Raises:
            ValueError: if a calibration has a state, outside of a quantized model.
        """
        cfg = self.cfg
        in_float = cfg is None or is_product(cfg, operation, rhs.shape)
        if cfg is not None and cfg.is_quantized and injected.is_marking():
            if in_float:  # The plan says why.
                return contract(None, operation, lhs, rhs, options)
            mark = injected.Injected
            return injected.marked(mark, cfg, operation, lhs, rhs, options)
        if cfg is not None and collections_of(cfg) and not in_float:
            raise ValueError(
                f"a calibration of {type(self).__name__}.cfg gathers statistics or is "
                "learned, and an injected function has no variables: call the model "
                "through aqtlite.flax.nnx.quantize_model(model, ()), which keeps them"
            )
        return contract(cfg, operation, lhs, rhs, options)


@injectable
@dataclasses.dataclass(frozen=True)
class AqtDotGeneral(Injected):
    """A quantized `dot_general` for NNX layers.

    Pass it as `dot_general=` of `nnx.Linear`, `nnx.LinearGeneral` and `AqtEmbed`, as
    `qkv_dot_general=` and `out_dot_general=` of `nnx.MultiHeadAttention`, or as
    ``functools.partial(AqtDotGeneral, cfg)`` where a layer takes a class. It has no
    variables, compares by value, and one instance may be shared by any number of
    layers. `convert` freezes the weights of a model with such layers.

    >>> import jax.numpy as jnp
    >>> layer = nnx.Linear(
    ...     3, 4, dot_general=AqtDotGeneral(config.fully_quantized()), rngs=nnx.Rngs(0)
    ... )
    >>> layer(jnp.ones((2, 3))).shape
    (2, 4)

    Raises:
        TypeError: if `cfg` is neither a `config.DotGeneral` nor None.
        ValueError: if `cfg` quantizes results.
    """

    def __call__(
        self,
        lhs: Any,
        rhs: Any,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array | QTensor:
        """Contracts like `jax.lax.dot_general`; see `aqtlite.make_dot_general`."""
        lhs, rhs = as_operands(lhs, rhs)
        operation = operations.DotGeneral.of(dimension_numbers, lhs.shape, rhs.shape)
        options = Options(precision, preferred_element_type, out_sharding)
        return self.run(operation, lhs, rhs, options)


@injectable
@dataclasses.dataclass(frozen=True)
class AqtEinsum(Injected):
    """A quantized einsum for NNX layers, based on `AqtDotGeneral`.

    Pass it as `einsum_op=` of `nnx.Einsum`.

    >>> import jax.numpy as jnp
    >>> layer = nnx.Einsum(
    ...     "bk,kn->bn", (3, 4), einsum_op=AqtEinsum(config.fully_quantized()),
    ...     rngs=nnx.Rngs(0),
    ... )
    >>> layer(jnp.ones((2, 3))).shape
    (2, 4)
    """

    def __call__(
        self,
        eqn: str,
        *operands: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array | QTensor:
        """Evaluates the equation like `jnp.einsum`; see `aqtlite.einsum`."""
        check_equation(eqn)
        arrays = as_operands_of_einsum(operands)
        steps = einsum_path.steps_of(eqn, arrays)

        def run(number: int, step: Step, lhs: Any, rhs: Any) -> jax.Array | QTensor:
            del number
            lhs, rhs, operation, order = as_dot_general(step.equation, lhs, rhs)
            options = Options(
                precision,
                preferred_element_type,
                out_sharding if step.is_last else None,
                order=order,
            )
            given = step.config_of(self.cfg)
            cfg = attention.config_of(given, step.equation)
            own = self if cfg is self.cfg else dataclasses.replace(self, cfg=cfg)
            with attention.noted(given, step.equation):
                return own.run(operation, lhs, rhs, options)

        return einsum_path.contracted(steps, arrays, run)


@injectable
@dataclasses.dataclass(frozen=True)
class AqtConvGeneralDilated(Injected):
    """A quantized `conv_general_dilated` for `nnx.Conv`.

    >>> import jax.numpy as jnp
    >>> conv = nnx.Conv(3, 4, (3, 3), rngs=nnx.Rngs(0), conv_general_dilated=(
    ...     AqtConvGeneralDilated(config.fully_quantized())))
    >>> conv(jnp.ones((2, 8, 8, 3))).shape
    (2, 8, 8, 4)
    """

    def __call__(
        self,
        lhs: Any,
        rhs: Any,
        window_strides: Sequence[int],
        padding: Any,
        lhs_dilation: Sequence[int] | None = None,
        rhs_dilation: Sequence[int] | None = None,
        dimension_numbers: Any = None,
        feature_group_count: int = 1,
        batch_group_count: int = 1,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array | QTensor:
        """Convolves like `jax.lax.conv_general_dilated`.

        See `aqtlite.make_conv_general_dilated`.
        """
        lhs, rhs = as_operands(lhs, rhs)
        operation = operations.ConvGeneralDilated.of(
            lhs.shape,
            rhs.shape,
            window_strides,
            padding,
            lhs_dilation,
            rhs_dilation,
            dimension_numbers,
            feature_group_count,
            batch_group_count,
        )
        options = Options(precision, preferred_element_type, out_sharding)
        return self.run(operation, lhs, rhs, options)


class AqtEmbed(nnx.Embed):
    """`flax.nnx.Embed` with a `dot_general` argument for `attend`.

    Its other arguments and its parameter are those of `nnx.Embed`. The table stays in
    float for lookups.

    >>> import jax.numpy as jnp
    >>> from aqtlite import config
    >>> from aqtlite.flax.nnx import AqtDotGeneral
    >>> dot_general = AqtDotGeneral(config.fully_quantized())
    >>> embed = AqtEmbed(8, 4, dot_general=dot_general, rngs=nnx.Rngs(0))
    >>> embed.attend(embed(jnp.array([[3, 1, 2]]))).shape
    (1, 3, 8)
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        dot_general: Any = jax.lax.dot_general,
        rngs: nnx.Rngs,
        **kwargs: Any,
    ):
        super().__init__(num_embeddings, features, rngs=rngs, **kwargs)
        self.dot_general = dot_general

    def attend(self, query: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Contracts a query with each row, as `nnx.Embed.attend` does."""
        query, table = self.promote_dtype(
            (query, self.embedding[...]), dtype=self.dtype
        )
        dims = (((query.ndim - 1,), (1,)), ((), ()))
        return self.dot_general(query, table, dims, out_sharding=out_sharding)
