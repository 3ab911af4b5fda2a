"""Times of contractions that a folder keeps from one measurement to the next."""

import json
import math
import pathlib
import re
from concurrent import futures

import jax.numpy as jnp
import pytest

import aqtlite
from aqtlite.program.measuring import kept_times
from tests.common import nearest

pytestmark = pytest.mark.code("quick")

SECONDS = 1e-3


def planned(width=4):
    def model(params, x):
        return x @ params

    args = jnp.ones((8, width)), jnp.ones((2, 8))
    return aqtlite.plan(model, *args, rules=nearest(), params=0)


def times(folder, width=4, measure=aqtlite.measure_serving, seconds=SECONDS):
    found = measure(planned(width), seconds=seconds, cache_dir=folder)
    (one,) = found.contractions
    return one.float_seconds, one.quantized_seconds, one.served_seconds


def test_a_contraction_is_measured_once_for_each_purpose(tmp_path):
    folder = tmp_path / "new" / "folder"
    serving = times(folder)
    training = times(folder, measure=aqtlite.measure_training)
    other = times(folder, width=8)
    assert len({serving, training, other}) == 3
    assert times(folder) == serving and times(folder, width=8) == other
    assert times(folder, measure=aqtlite.measure_training) == training


def test_without_a_folder_all_is_measured(tmp_path):
    assert times(None) != times(None)
    assert not list(tmp_path.iterdir())


def test_a_longer_measurement_replaces_a_shorter_one(tmp_path):
    short = times(tmp_path)
    long = times(tmp_path, seconds=2 * SECONDS)
    assert long != short and times(tmp_path) == long


@pytest.mark.parametrize(
    ("name", "value"),
    [("NPROC", "7"), ("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")],
)
def test_another_number_of_threads_or_flag_has_a_file_of_its_own(
    tmp_path, monkeypatch, name, value
):
    first = times(tmp_path)
    with monkeypatch.context() as patched:
        patched.setenv(name, value)
        assert times(tmp_path) != first
    assert times(tmp_path) == first and len(list(tmp_path.iterdir())) == 2


def test_the_file_is_read_once_for_all_that_is_known(tmp_path, monkeypatch):
    def model(params, x):
        return [x @ one for one in params]

    args = [jnp.ones((8, n)) for n in (2, 3, 4)], jnp.ones((2, 8))
    plan = aqtlite.plan(model, *args, rules=nearest(), params=0)
    first = aqtlite.measure_serving(plan, seconds=SECONDS, cache_dir=tmp_path)
    reads = []
    read_text = pathlib.Path.read_text

    def counted(path, *args, **kwargs):
        reads.append(path)
        return read_text(path, *args, **kwargs)

    monkeypatch.setattr(pathlib.Path, "read_text", counted)
    again = aqtlite.measure_serving(plan, seconds=SECONDS, cache_dir=tmp_path)
    assert again.to_json() == first.to_json()
    assert [path.parent for path in reads].count(tmp_path) == 1


def test_threads_add_to_one_file(tmp_path):
    kept = kept_times.in_folder(tmp_path)
    measured = kept_times.Times(1.0, 0.1, 1.0, 1.0)
    with futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: kept.keep(f"{i}", measured), range(40)))
    again = kept_times.in_folder(tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]
    assert again.known and set(again.known.values()) == {measured}
    kept_times.in_folder(tmp_path).keep("later", measured)
    kept.keep("earlier opened", measured)  # Keeps what is there by now.
    assert kept_times.in_folder(tmp_path).find("later", 1.0) == measured


def of_another_machine(text):
    fields = json.loads(text)
    fields["machine"]["processor"] = "another"
    return json.dumps(fields)


def with_time(value):
    def spoiled(text):
        fields = json.loads(text)
        (one,) = fields["contractions"].values()
        one["in_float"] = value
        return json.dumps(fields)

    return spoiled


@pytest.mark.parametrize(
    ("spoiled", "why"),
    [
        (lambda text: text.rstrip()[:-1], "delimiter"),
        (lambda text: "[]", "its format is not aqtlite.times.1"),
        (lambda text: text.replace('"contractions"', '"others"'), "iterable"),
        (lambda text: text.replace("in_float", "in_double"), "in_double"),
        (of_another_machine, "it is of .*another"),
        (lambda text: "[" * 100_000, "recursion"),
        (with_time(-1.0), "in_float must be a positive, finite float, got -1.0"),
        (with_time(math.inf), "in_float must be a positive, finite float, got inf"),
    ],
)
def test_a_file_that_holds_no_times_is_moved_and_measured_anew(
    tmp_path, caplog, spoiled, why
):
    first = times(tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(spoiled(path.read_text()))
    content = path.read_text()
    with caplog.at_level("WARNING", logger="absl"):
        again = times(tmp_path)
    assert again != first and times(tmp_path) == again
    assert path.with_suffix(".unreadable").read_text() == content
    assert "held no times of this machine" in caplog.text
    assert re.search(why, caplog.text)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="file"):
        times(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_the_folder_of_the_user(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert str(kept_times.user_folder()) == "/caches/aqtlite"
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "a/relative/path")
    assert str(kept_times.user_folder()) == "/home/me/.cache/aqtlite"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert str(kept_times.user_folder()) == "/home/me/.cache/aqtlite"


@pytest.mark.parametrize("value", [0.0, -1.0, 1, "1", True, math.nan, math.inf])
def test_times_are_positive(value):
    with pytest.raises(ValueError, match="quantized must be a positive, finite"):
        kept_times.Times(1.0, 1.0, 1.0, value)
