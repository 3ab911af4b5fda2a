"""The operators of what stands in place of an array and has no arithmetic."""

from typing import Any, NoReturn


class NoArithmetic:
    """Raises an error of the subclass in place of NumPy's operators and conversions.

    It is no `abc.ABC`: that would slow down `isinstance`, which tracing calls for every
    value.
    """

    def arithmetic_error(self) -> TypeError:
        """Returns the error, which says what to do instead."""
        raise NotImplementedError

    def _refuse(self, *others: Any, **options: Any) -> NoReturn:
        del others, options
        raise self.arithmetic_error()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __pow__ = _refuse
    __rpow__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __neg__ = __abs__ = __array__ = __jax_array__ = _refuse
    __array_ufunc__ = None
