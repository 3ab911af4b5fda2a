"""The command line: dispatch, help, errors in one line, exit codes."""

import dataclasses
import io
import os
import signal
import subprocess
import sys

import pytest

import aqtlite
from aqtlite import __main__ as program
from aqtlite import cli
from aqtlite.errors import UserError

pytestmark = pytest.mark.code("quick")


def _exit_code(argv):
    with pytest.raises(SystemExit) as exit_info:
        program.main(argv)
    return exit_info.value.code


ARGV = ["presets"]


def _one_command(run):
    command = cli.COMMANDS[0]
    return (dataclasses.replace(command, run=run),)


def test_help_names_every_command(capsys):
    assert _exit_code(["--help"]) == 0
    shown = capsys.readouterr().out
    for command in program.COMMANDS:
        assert command.name in shown
        assert command.summary.split()[0] in shown


@pytest.mark.parametrize("command", ["", *(one.name for one in program.COMMANDS)])
def test_help_is_narrow_and_ends_with_examples(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert _exit_code([*filter(None, [command]), "--help"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 78
    last = shown.partition("\nexamples:\n")[2]
    assert last and all(line.startswith("  ") for line in last.splitlines())


def test_required_options_are_shown_as_such(capsys):
    assert _exit_code(["edge", "--help"]) == 0
    shown = capsys.readouterr().out
    required = shown.partition("required options:\n")[2].partition("\n\n")[0]
    assert "--model" in required and "--calibrate" in required


def test_demo_help_teaches(capsys):
    assert _exit_code(["demo", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "aqtlite demo --smoke" in shown
    assert "(default: 360)" in shown
    for flag in ("steps", "layers", "width", "heads", "lr", "seed", "text", "out"):
        assert f"--{flag} " in shown


def test_version(capsys):
    assert _exit_code(["--version"]) == 0
    assert capsys.readouterr().out == f"aqtlite {aqtlite.__version__}\n"


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "COMMAND"),
        (["nonsense"], "no command 'nonsense'; there are demo, presets, plan"),
        (["-v", "convrt"], "no command 'convrt'; did you mean 'convert'?"),
        (["demo", "--steps", "many"], "--steps"),
        (["demo", "--zzz"], "aqtlite demo: error: no option '--zzz' (see"),
        (["demo", "--stps", "9"], "no option '--stps'; did you mean '--steps'?"),
        (["convert", "in", "out", "--modle=m:f"], "did you mean '--model'?"),
        (["convert", "in", "out", "--subtre", "a"], "did you mean '--subtree'?"),
        (["presets", "--", "--jsn"], "no preset '--jsn'"),
        (["--versoin"], "did you mean '--version'?"),
    ],
)
def test_malformed_command_line_is_one_line_and_exit_code_2(argv, message, capsys):
    assert _exit_code(argv) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--width", "30", "--heads", "4"], "divisible"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--lr", "nan"], "--lr"),
        (["--fwd-bits", "9"], "--fwd-bits must be between 2 and 8"),
        (["--text", "/no/such/file"], "/no/such/file"),
        (["--out", "/dev/null/results"], "/dev/null/results"),
    ],
)
def test_user_error_is_one_line_and_exit_code_2(argv, message, capsys, tmp_path):
    assert program.main(["demo", "--out", str(tmp_path), *argv]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("aqtlite demo: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("argv", [["-v", "demo"], ["demo", "-v"]])
def test_verbose_shows_the_traceback(argv, capsys):
    assert program.main([*argv, "--steps", "0"]) == 2
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "aqtlite demo: error: --steps must be at least 1" in shown


def test_exit_codes_of_a_command(capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    def failing(args):
        raise UserError("put this right")

    for run, code in [(lambda args: 1, 1), (interrupted, 130), (failing, 2)]:
        assert cli.main(ARGV, _one_command(run)) == code
    assert "interrupted" in capsys.readouterr().err


COMPILING = """
import dataclasses, signal, time
import jax, jax.numpy as jnp
from aqtlite import cli

# What a shell runs in the background ignores it, and so does what that starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

def slow(x):
    for i in range(300):
        x = jnp.cumsum(jnp.sin(x + i))
    return x

def run(args):
    lowered = jax.jit(slow).lower(jnp.ones(8))
    print("compiling", flush=True)
    lowered.compile()
    time.sleep(600)  # On a machine that compiles it at once.

cli.run((dataclasses.replace(cli.COMMANDS[0], run=run),))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="it is of Linux")
def test_output_that_cannot_be_written():
    """Exit code 1 would say that a check of the command failed."""
    command = [sys.executable, "-m", "aqtlite", "presets"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    why = "its output cannot be written: No space left on device"
    assert done.stderr.splitlines()[0] == f"aqtlite presets: error: {why}"


@pytest.mark.slow
def test_output_that_is_not_read_to_the_end():
    command = [sys.executable, "-m", "aqtlite", "presets", "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (141, "")


def test_interrupted_while_it_compiles():
    """JAX compiles in a thread, which goes on while Python ends."""
    # A program of the cache would not be compiled.
    env = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, "-c", COMPILING, *ARGV]
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "compiling\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert process.returncode == 130
    assert said == "aqtlite presets: interrupted. Run the same command to start over\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "tcsh"])
def test_completion(shell, capsys):
    assert program.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("convert", "overwrite", "nvfp4"):
        assert word in script


def test_bash_completes(capsys, tmp_path):
    assert program.main(["completion", "bash"]) == 0
    script = tmp_path / "aqtlite.bash"
    script.write_text(capsys.readouterr().out)
    (tmp_path / "data.npz").touch()

    def complete(*words):
        code = (
            f"source {script}; COMP_WORDS=(aqtlite {' '.join(words)}); "
            f"COMP_CWORD={len(words)}; $(complete -p aqtlite | "
            r"sed 's/.*-F \([^ ]*\).*/\1/'); "
            'echo "${COMPREPLY[@]}"'
        )
        done = subprocess.run(
            ["bash", "-c", code], capture_output=True, text=True, cwd=tmp_path
        )
        return done.stdout.split()

    assert complete("conv") == ["convert"]
    assert complete("plan", "--preset", "smooth") == ["smoothquant"]
    assert "--overwrite" in complete("convert", "--o")
    assert complete("edge", "--calibrate", "da") == ["data.npz"]


def test_completion_needs_shtab(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert program.main(["completion", "bash"]) == 2
    assert "pip install 'aqtlite[completion]'" in capsys.readouterr().err


@pytest.mark.slow
def test_missing_dependency_says_how_to_get_it():
    code = (
        "import sys; sys.modules['optax'] = None\n"
        "from aqtlite.__main__ import main; sys.exit(main(['demo', '--smoke']))"
    )
    done = _python("-c", code)
    assert done.returncode == 2
    assert done.stderr == (
        "aqtlite demo: error: the demo needs the package 'optax': pip install "
        "optax, or in a clone of aqtlite pip install -e '.[demo]'\n"
    )


@pytest.mark.parametrize("argv", [["--help"], ["convert", "--help"], ["edge", "a"]])
def test_what_is_told_before_jax_is_imported(argv):
    """JAX takes seconds to import."""
    code = (
        f"import sys, runpy; sys.argv = ['aqtlite', *{argv}]\n"
        "try: runpy.run_module('aqtlite', run_name='__main__')\n"
        "except SystemExit: print('loaded', {'jax', 'flax', 'rich'} & {*sys.modules})"
    )
    done = _python("-c", code)
    assert "usage: aqtlite" in done.stdout or "required" in done.stderr
    assert done.stdout.endswith("loaded set()\n")


def test_public_names_are_there_when_they_are_used():
    assert [name for name in dir(aqtlite) if not hasattr(aqtlite, name)] == []
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        aqtlite.nonsense  # noqa: B018


def _python(*argv):
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True)


@pytest.mark.parametrize("errors", ["strict", "surrogateescape", "replace"])
def test_characters_that_standard_output_lacks_are_escaped(errors, monkeypatch):
    shown = io.BytesIO()
    out = io.TextIOWrapper(shown, encoding="ascii", errors=errors)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "argv", ["aqtlite", *ARGV])
    with pytest.raises(SystemExit) as ended:
        cli.app.run(_one_command(lambda args: print("the \u732b")))
    out.flush()
    text = b"the ?" if errors == "replace" else rb"the \u732b"
    assert ended.value.code is None and shown.getvalue().rstrip() == text
