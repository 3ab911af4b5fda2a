"""What is compared on a network, prepared and measured one by one."""

import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import jax

import aqtlite.onnx
from benchmarks.pretrained import edge_files, measuring, peers, routes
from benchmarks.pretrained.measuring import Figures
from benchmarks.pretrained.networks import Network
from benchmarks.pretrained.tasks.task import Arrays, Task

FLOAT = "float32"
CONTROL = f"float32, noise of {measuring.NOISE:.0f} dB on its input"

NAMES = (
    *(FLOAT, CONTROL, *routes.NAMES),
    *(peers.FLOAT, peers.DYNAMIC, *peers.STATIC),
    *edge_files.FILES,
)


class Refused(Exception):
    """A contestant does not take the network; the message has the reason."""


class Contest:
    """The contestants on one network."""

    def __init__(self, network: Network, task: Task, rounds: int):
        """Loads the network, and checks that JAX computes what onnxruntime does.

        Args:
            network: the network.
            task: the data and the metric.
            rounds: rounds of the comparison of times.

        Raises:
            AssertionError: if outputs differ by more than `Network.exactness`.
        """
        path = network.path()
        self._path, self._task, self._rounds = path, task, rounds
        self._edge_rules = network.edge_rules
        function, self._parameters = aqtlite.onnx.load(path)
        self._network = _with_tuple(function)
        run = jax.jit(self._network)
        self._float = lambda *inputs: run(self._parameters, *inputs)
        self._peer = peers.session(path)
        self._nbytes = routes.nbytes(self._parameters)
        self._exact = measuring.outputs_of(self._float, task.batches)
        expected = measuring.outputs_of(self._peer, task.batches)
        self.difference = measuring.difference(self._exact, expected)
        if not self.difference <= network.exactness:
            raise AssertionError(
                f"{network.name}: outputs in JAX differ from onnxruntime's "
                f"by {self.difference:.2g}, expected at most {network.exactness:.2g}"
            )

    def figures(self, name: str) -> Figures:
        """Prepares and measures the contestant of a name.

        Raises:
            Refused: if the contestant does not take the network.
            edge_files.NoQuantizerError: if it needs a package that is missing.
        """
        if name == FLOAT:
            return self._measure(self._float, self._nbytes, is_float=True)
        if name == peers.FLOAT:
            return self._measure(self._peer, self._nbytes, is_float=True)
        if name == CONTROL:
            return self._control()
        if name in routes.NAMES:
            return self._route(routes.select(name))
        if name in edge_files.FILES:
            return self._edge_file(name)
        return self._quantized_peer(name)

    def _first(self, parameters: Any, *inputs: Any) -> Any:
        """The output that decibels are measured of."""
        return self._network(parameters, *inputs)[0]

    def blame(self) -> list[tuple[str, float]]:
        """See `routes.blame`."""
        return routes.blame(self._first, self._parameters, self._task.sample)

    def _control(self) -> Figures:
        batches = measuring.noisy(self._task.batches)
        if batches is None:
            raise Refused("its inputs are integers")
        outputs = measuring.outputs_of(self._float, batches)
        return Figures(
            metric=self._task.score(outputs),
            decibels=measuring.decibels(self._exact, outputs),
            nbytes=self._nbytes,
            in_float=1.0,
            times={},
        )

    def _route(self, route: routes.Route) -> Figures:
        held = self._task.calibration
        try:
            rules = route.choose(self._first, self._parameters, self._task.sample)
            serve, serving = routes.served(self._network, self._parameters, rules, held)
        except ValueError as error:
            raise Refused(_first_line(error)) from error
        run = jax.jit(serve)
        return self._measure(lambda *x: run(serving, *x), routes.nbytes(serving))

    def _quantized_peer(self, name: str) -> Figures:
        with tempfile.TemporaryDirectory() as folder:
            try:
                file = peers.quantize(
                    name, self._path, self._task.calibration, pathlib.Path(folder)
                )
                call = peers.session(file)
            except peers.errors() as error:
                raise Refused(_first_line(error)) from error
            return self._measure(call, file.stat().st_size)

    def _edge_file(self, name: str) -> Figures:
        held = self._task.calibration
        source = edge_files.Source(
            self._network, self._parameters, held, self._edge_rules
        )
        with tempfile.TemporaryDirectory() as folder:
            try:
                file = edge_files.write(name, source, pathlib.Path(folder))
                call = edge_files.loaded(file)
            except (ValueError, RuntimeError) as error:
                raise Refused(_first_line(error)) from error
            return self._measure(call, file.stat().st_size)

    def _measure(
        self, call: Callable[..., Any], nbytes: int, *, is_float: bool = False
    ) -> Figures:
        return measuring.measure(
            call,
            nbytes,
            self._nbytes,
            self._task,
            None if is_float else self._exact,
            {FLOAT: self._float, peers.FLOAT: self._peer},
            self._rounds,
        )


def _with_tuple(network: Callable[..., Any]) -> Callable[..., Arrays]:
    """The network with a tuple of outputs, as onnxruntime has them."""

    def call(parameters: Any, *inputs: Any) -> Any:
        outputs = network(parameters, *inputs)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    return call


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
