"""Interruptions that Python or JAX would ignore."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

_ENDED = "The command had ended by then, and what it wrote is there"


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Ends a block that was interrupted with KeyboardInterrupt, come what may.

    Python prints and ignores what is raised in callbacks of its garbage collector, of
    which JAX has one, and in ``__del__``: a block that is interrupted there goes on.
    Of such a block, KeyboardInterrupt is raised when it ends, in the place of another
    exception, too.

    In other threads, which get no signals, and where SIGINT is ignored or has a handler
    of the caller's, nothing is changed.

    Raises:
        KeyboardInterrupt: if SIGINT arrived while the block ran.
    """
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or before is not signal.default_int_handler:
        yield
        return
    arrived = threading.Event()

    def interrupt(number: int, frame: Any) -> None:
        arrived.set()
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception as error:
        if arrived.is_set():
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, before)
    if arrived.is_set():
        late = KeyboardInterrupt()
        late.add_note(_ENDED)
        raise late
