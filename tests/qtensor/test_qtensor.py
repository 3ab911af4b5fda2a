import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import aqtlite
from aqtlite import QTensor
from tests.common import assert_same, normal, tensor

pytestmark = pytest.mark.code("quick")


def make(shape=(3, 4, 5), bits=8, axes=(1,)):
    return aqtlite.quantize(normal(shape), tensor(bits), axes)


def test_shape_dtype_and_dequant():
    q = aqtlite.quantize(normal((3, 4), dtype=jnp.bfloat16), tensor(4), 0)
    assert (q.shape, q.ndim, q.dtype) == ((3, 4), 2, jnp.bfloat16)
    assert (q.qvalue.dtype, q.scale.dtype) == (jnp.int4, jnp.float32)
    assert q.dequant().dtype == jnp.bfloat16
    wanted = np.asarray(q.qvalue, np.float32) * np.asarray(q.scale)
    np.testing.assert_array_equal(q.dequant(), jnp.asarray(wanted, jnp.bfloat16))


def test_is_a_pytree_of_two_leaves():
    q = make()
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(q)]
    assert paths == [".qvalue", ".scale"]
    doubled = jax.tree.map(lambda leaf: leaf * 2, q)
    assert isinstance(doubled, QTensor) and doubled.dtype == q.dtype
    shapes = jax.eval_shape(lambda: make())
    assert isinstance(shapes, QTensor) and shapes.shape == q.shape


def test_through_jit():
    q = make()
    assert_same(jax.jit(lambda q: q)(q), q)
    assert_same(jax.jit(lambda q: q.dequant())(q), q.dequant())


@pytest.mark.parametrize("bits", [8, 4])
def test_through_scan(bits):
    """As scanned layers: each step takes one slice of values and of scales."""
    q = make(bits=bits)

    def step(carry, layer):
        assert isinstance(layer, QTensor) and layer.shape == (4, 5)
        return carry + layer.dequant().sum(), layer

    total, layers = jax.lax.scan(step, 0.0, q)
    assert_same(layers, q)
    np.testing.assert_allclose(total, q.dequant().sum(), atol=1e-4)


def test_through_vmap_and_device_put():
    q = make()
    assert_same(jax.vmap(lambda q: q.dequant())(q), q.dequant())
    assert_same(jax.device_put(q, jax.devices()[0]), q)


@pytest.mark.parametrize("bits", [8, 4, 1])
def test_through_orbax(tmp_path, bits):
    q = make(bits=bits)
    tree = {"layer": {"kernel": q}, "step": jnp.int32(3)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", tree)
        checkpointer.wait_until_finished()
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
        restored = checkpointer.restore(tmp_path / "checkpoint", abstract)
    assert isinstance(restored["layer"]["kernel"], QTensor)
    assert_same(restored, tree)


@pytest.mark.parametrize(
    "index",
    [
        0,
        -1,
        np.int64(1),
        slice(None),
        slice(1, 3),
        slice(None, None, -2),
        slice(2, 2),
        ...,
        None,
        (),
        (0, 1),
        (0, slice(1, 3), -1),
        (slice(None), 2),
        (slice(None), slice(1, 2), None),
        (..., 0),
        (..., slice(0, 2)),
        (0, ..., None, 3),
        (None, slice(1, 3), None, 0),
        (1, 2, 3),
        (..., 1, 2, 3),
    ],
    ids=repr,
)
@pytest.mark.parametrize("axes", [(1,), (0, 2), (0, 1, 2), ()])
def test_index_is_that_of_the_array(index, axes):
    """As numpy indexes the dequantized array, exactly."""
    q = QTensor(
        *(np.asarray(leaf) for leaf in jax.tree.leaves(make(axes=axes))),
        np.dtype("float32"),
    )
    got = q[index]
    values = q.qvalue.astype(np.float32) * q.scale
    assert isinstance(got, QTensor) and got.dtype == q.dtype
    assert got.ndim == got.scale.ndim == values[index].ndim
    np.testing.assert_array_equal(
        got.qvalue.astype(np.float32) * got.scale, values[index]
    )


def test_index_under_jit_with_a_traced_int():
    q = make()
    at = jax.jit(lambda q, i: q[i, :, 1:])(q, 2)
    np.testing.assert_array_equal(at.dequant(), q.dequant()[2, :, 1:])


@pytest.mark.parametrize(
    ("index", "error"),
    [
        ([0, 1], TypeError),
        (np.array([0, 1]), TypeError),
        (np.array([True, False, True]), TypeError),
        (True, TypeError),
        ((0, [1]), TypeError),
        ("a", TypeError),
        (1.0, TypeError),
        ((0, 0, 0, 0), IndexError),
        ((..., ...), IndexError),
    ],
    ids=repr,
)
def test_refuses_index(index, error):
    with pytest.raises(error):
        make()[index]


def test_iterates_over_its_first_axis():
    q = make()
    assert len(q) == q.shape[0] == len(list(q))
    for row, wanted in zip(q, q.dequant(), strict=True):
        np.testing.assert_array_equal(row.dequant(), wanted)
    for index in (q.shape[0], -q.shape[0] - 1):
        with pytest.raises(IndexError, match="out of range"):
            q[index]
    with pytest.raises(TypeError, match="no length"):
        len(q[0, 0, 0])


def test_reads_in_its_own_order_whatever_the_order_it_is_stored_in():
    q = make()
    stored = q.stored_in((2, 0, 1))
    assert stored.shape == q.shape != stored.qvalue.shape
    np.testing.assert_array_equal(stored.dequant(), q.dequant())
    np.testing.assert_array_equal(stored[:, 1].dequant(), q[:, 1].dequant())
    # Stacked by a scan: the order is that of the trailing axes.
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), stored)
    assert stack.shape == (2, *q.shape)
    np.testing.assert_array_equal(stack.dequant()[1], q.dequant())


def test_a_stack_of_a_stored_order_is_contracted_along_a_batch_axis():
    x, w = normal((2, 4, 8)), normal((2, 8, 3), 1)
    dot = aqtlite.make_dot_general(aqtlite.config.fully_quantized())
    q = aqtlite.quantize(w, tensor(8), 1)
    stack = jax.vmap(lambda q: q.stored_in((1, 0)))(q)
    dims = (((2,), (1,)), ((0,), (0,)))
    np.testing.assert_array_equal(dot(x, stack, dims), dot(x, q, dims))


def test_a_stored_order_is_contracted_where_it_lies():
    x, w = normal((4, 8)), normal((8, 3), 1)
    dot = aqtlite.make_dot_general(aqtlite.config.fully_quantized())
    q = aqtlite.quantize(w, tensor(8), 0)
    dims = (((1,), (0,)), ((), ()))
    np.testing.assert_array_equal(dot(x, q.stored_in((1, 0)), dims), dot(x, w, dims))


class TestOffset:
    """A float added to the scaled values of a block."""

    def make(self):
        codes = jnp.arange(24, dtype=jnp.uint8).reshape(3, 8) % 16
        scale = jnp.asarray([[0.5, 3.0], [0.25, 7.0], [1.5, 0.1]], jnp.float32)
        offset = jnp.asarray([[1, -2], [0.1, 5], [3, 0]], jnp.float32)
        return QTensor(codes, scale, np.dtype("float32"), offset=offset)

    def test_dequant(self):
        q = self.make()
        scale, offset = (np.repeat(x, 4, axis=1) for x in (q.scale, q.offset))
        wanted = np.asarray(q.qvalue, np.float32) * scale + offset
        np.testing.assert_array_equal(q.dequant(), wanted)
        np.testing.assert_array_equal(jax.jit(QTensor.dequant)(q), wanted)
        assert "offset=float32[3,2]" in repr(q)

    def test_moves_with_the_scales(self):
        q, x = self.make(), self.make().dequant()
        assert_same(q.T.dequant(), x.T)
        assert_same(q.stored_in((1, 0)).dequant(), x)
        assert_same(q[1:, :4].dequant(), x[1:, :4])
        assert_same(q.reshape(3, 2, 4).dequant(), x.reshape(3, 2, 4))
        joined = aqtlite.shape_operations.concatenate([q, q], axis=1)
        assert_same(joined.dequant(), jnp.concatenate([x, x], axis=1))

    def test_is_neither_contracted_nor_padded(self):
        q = self.make()
        cfg = aqtlite.config.weight_only()
        with pytest.raises(TypeError, match="an offset for each block"):
            aqtlite.einsum("bk,nk->bn", jnp.ones((2, 8)), q, cfg=cfg)
        with pytest.raises(ValueError, match=r"pad the result of .dequant"):
            aqtlite.shape_operations.pad(q, 4)
        plain = make((3, 8))
        with pytest.raises(TypeError, match="an offset False and True|storage"):
            aqtlite.shape_operations.concatenate([plain, q])
