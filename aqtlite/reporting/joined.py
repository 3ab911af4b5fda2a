"""Joins the contractions of a traced program with the products that a compiler made.

A compiler keeps what JAX calls an operation: its scopes, among the functions, loops and
branches around it. In equal scopes (both gradients of a layer), the numbers of products
and of results tell which is which.
"""

import collections
import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from aqtlite.jaxpr import scopes
from aqtlite.reporting.products import Product
from aqtlite.reporting.traced import Role, TracedContraction

_FUNCTION = re.compile(r"\bjit\([^()/]*\)")


class Place(NamedTuple):
    """Where an operation of a compiled program comes from."""

    names: tuple[str, ...]
    """Names of scopes, loops and primitives, outermost first."""

    role: Role

    @classmethod
    def of(cls, op_name: str) -> "Place":
        """Reads what JAX calls an operation.

        Names of jitted functions are not among them: a scope may have the same name.

        >>> Place.of("jit(up)/transpose(jvp(M))/up/dot_general")
        Place(names=('M', 'up', 'dot_general'), role='gradient')
        """
        scope = scopes.parse(_FUNCTION.sub("", op_name))
        names = tuple(scope.path.split("/"))
        if "rematted_computation" in names:
            return cls(names, "recomputed")
        return cls(names, "gradient" if _is_transposed(scope) else "forward")


def _is_transposed(scope: scopes.Scope) -> bool:
    return "transpose" in scope.transformations


class Joined(NamedTuple):
    """The products of each contraction, and those of none."""

    products: list[list[Product]]
    """For each contraction, its products."""

    others: list[Product]
    """Products of no contraction, which the compiler or JAX made of something else."""


def join(traced: Sequence[TracedContraction], products: Sequence[Product]) -> Joined:
    """Joins contractions with products."""
    found: list[list[Product]] = [[] for _ in traced]
    others = []
    candidates = finder(traced)

    def add(product: Product, indices: Sequence[int]) -> None:
        """Adds a product to the most similar of some contractions."""
        if not indices:
            others.append(product)
            return
        likeness = [_distance(traced[i], product, found[i]) for i in indices]
        found[indices[likeness.index(min(likeness))]].append(product)

    for product in products:
        if product.is_sum and product.op_name:
            add(product, candidates(product.op_name))
    unnamed = [one for one in products if one.is_sum and not one.op_name]
    free = [i for i, one in enumerate(found) if not one]
    pairs = [
        (_distance(traced[i], product, []), i, number)
        for number, product in enumerate(unnamed)
        for i in free
        if _is_multiple(traced[i], product)
    ]
    left = set(range(len(unnamed)))
    for _, i, number in sorted(pairs):
        if not found[i] and number in left:
            left.remove(number)
            found[i].append(unnamed[number])
    others += [unnamed[number] for number in sorted(left)]
    # Small ones are no contractions to the compiler any more, but arithmetic.
    for opcode in ("reduce", "multiply"):
        free = [i for i, one in enumerate(found) if not one]
        for product in products:
            if product.opcode == opcode:
                fitting = set(candidates(product.op_name)).intersection(free)
                if fitting:
                    add(product, sorted(fitting))
    return Joined(found, others)


def _is_multiple(one: TracedContraction, product: Product) -> bool:
    """Whether a product has as many times the products as the results."""
    if not one.macs or not product.macs:
        return False
    products, results = _ratios(one, product)
    return abs(products - results) < 0.1


def _ratios(one: TracedContraction, product: Product) -> tuple[float, float]:
    """Returns the logarithms of how many more products and results there are."""
    products = math.log(product.macs * product.times / (one.macs or 1))
    of_results = max(one.out_size * one.times, 1)
    return products, math.log(max(product.out.size, 1) * product.times / of_results)


def _distance(
    one: TracedContraction, product: Product, found: Sequence[Product]
) -> float:
    """How unlike a contraction a product is: 0 for equal numbers of products.

    Operands in several digits, or all experts in place of one, multiply products and
    results alike. Pieces, and masked experts, change the products alone. A contraction
    that has products already is a worse choice than another one like it.
    """
    taken = 0.05 * len(found)
    if not one.macs or not product.macs:
        return 100 + taken
    products, results = _ratios(one, product)
    shape = min(abs(products - results), abs(results))
    return shape + 0.5 * abs(products) + taken


def finder(traced: Sequence[TracedContraction]) -> Callable[[str], list[int]]:
    """Returns a function from what JAX calls an operation to contractions around it.

    These are the contractions with the most scopes among those whose scopes the name
    has, in order; of its role, if there are any.
    """
    of_place: dict[tuple[str, ...], list[int]] = collections.defaultdict(list)
    for index, one in enumerate(traced):
        of_place[one.scope].append(index)
    known: dict[str, list[int]] = {}

    def find(op_name: str) -> list[int]:
        if op_name not in known:
            known[op_name] = _candidates(Place.of(op_name), traced, of_place)
        return known[op_name]

    return find


def _candidates(
    place: Place,
    traced: Sequence[TracedContraction],
    of_place: dict[tuple[str, ...], list[int]],
) -> list[int]:
    fitting = [scope for scope in of_place if _is_within(scope, place.names)]
    for is_of_role in (True, False):
        found = [
            (len(scope), index)
            for scope in fitting
            for index in of_place[scope]
            if not is_of_role or traced[index].role == place.role
        ]
        if found:
            most, _ = max(found)
            return [index for length, index in found if length == most]
    return []


def _is_within(scope: tuple[str, ...], names: tuple[str, ...]) -> bool:
    """Whether all names of a scope are among others, in their order."""
    rest = iter(names)
    return all(name in rest for name in scope)
