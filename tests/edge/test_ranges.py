import pytest

from aqtlite import edge

pytestmark = pytest.mark.code("quick")

_RANGES = edge.Ranges({"input": (0, 1), "a/add": (-1.5, 2)})


def test_files(tmp_path):
    path = tmp_path / "ranges.json"
    _RANGES.save(path)
    assert edge.Ranges.load(path) == _RANGES


def test_addresses_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"an address \(gs://\)"):
        _RANGES.save("gs://bucket/ranges.json")
    assert not list(tmp_path.iterdir())


def test_a_link_is_refused(tmp_path):
    link = tmp_path / "link.json"
    link.symlink_to("ranges.json")
    with pytest.raises(ValueError, match="link.json is a symbolic link; name what it"):
        _RANGES.save(link)
    assert list(tmp_path.iterdir()) == [link] and link.is_symlink()


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "not valid JSON"),
        ("[]", "expected an object"),
        ('{"version": 2, "ranges": {}}', "version"),
        ('{"version": 1, "ranges": {"a": [0, 1]}}', r"ranges\['a'\]"),
        ('{"version": 1, "ranges": {"a": {"low": "x", "high": 1}}}', "two numbers"),
        ('{"version": 1, "ranges": {"a": {"low": "0", "high": 1}}}', "two numbers"),
        ('{"version": 1, "ranges": {"a": {"low": 0, "high": true}}}', "two numbers"),
        ('{"version": 1, "ranges": {"a": {"low": 2, "high": 1}}}', "above its end"),
        ('{"version": 1, "ranges": {"a": {"low": 2, "high": NaN}}}', "not finite"),
    ],
)
def test_damaged_files(tmp_path, text, message):
    path = tmp_path / "ranges.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"ranges.json.*{message}"):
        edge.Ranges.load(path)


def test_replaced():
    assert _RANGES.replace({"input": (-3, 3)})["input"] == (-3.0, 3.0)
    with pytest.raises(ValueError, match="no value 'output'; the values are input"):
        _RANGES.replace({"output": (0, 1)})


def test_no_mapping():
    with pytest.raises(TypeError, match="mapping"):
        edge.Ranges([("a", (0, 1))])
