"""Training as a terminal shows it: a bar that follows the rounds, and Ctrl-C between them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fedbayes.cli.shared import out


@contextmanager
def watching() -> Iterator[Any]:
    """What a run calls while it goes on (a Watch): a bar follows, and Ctrl-C is heeded after a round at the latest."""
    from fedbayes.cli.terminal import Bar
    from fedbayes.runs.folder import Watch

    with Bar(out) as bar, heeded_ctrl_c() as heed:

        def after_round(record: dict[str, Any]) -> None:
            bar.round(record)
            heed()

        yield Watch(bar.begun, bar.client, after_round, bar.ended)


@contextmanager
def heeded_ctrl_c() -> Iterator[Callable[[], None]]:
    """Gives a function that raises KeyboardInterrupt if Ctrl-C was pressed before: a compiler may have swallowed it."""
    pressed: list[int] = []

    def press(number: int, frame: Any) -> None:
        pressed.append(number)
        raise KeyboardInterrupt

    def heed() -> None:
        if pressed:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # which alone hears signals
        yield heed
        return
    before = signal.signal(signal.SIGINT, press)
    try:
        yield heed
    finally:
        signal.signal(signal.SIGINT, before)
