"""Processes that are sent signals, by name; started by test_signals. Each says what it sees, line by line."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from swansong.engine.signals import SignalWatch, reraise_sigterm
from swansong.errors import SwansongError

WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def say(words: str) -> None:
    """Tell the test. One write, so that lines of several threads do not mix."""
    os.write(1, f"{words}\n".encode())


def say_and_die() -> None:
    """What a processor does in the end."""
    say("terminated")
    reraise_sigterm()


def stuck() -> None:
    """Spend the rest of this process's life inside a C call that no signal interrupts, and say when.

    The thread that says so can run only once the main thread has let go of the interpreter lock, and that it
    does in the call: the switch interval keeps it from being asked to before.
    """
    enters = threading.Event()

    def tell() -> None:
        enters.wait()
        say("stuck")

    threading.Thread(target=tell, daemon=True).start()
    mutex = ctypes.create_string_buffer(64)  # zeros are PTHREAD_MUTEX_INITIALIZER
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    sys.setswitchinterval(1000.0)
    enters.set()
    lock(mutex)


class Before:
    """A wake-up descriptor of somebody who was there before; says which signals come through it."""

    def __init__(self, say_all: bool = False) -> None:
        self.seen: list[int] = []
        self.read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        self.write_end = write_end
        signal.set_wakeup_fd(write_end)
        if say_all:
            threading.Thread(target=self._say_all, daemon=True).start()

    def _say_all(self) -> None:
        while True:
            for number in os.read(self.read_end, 1):
                say(f"forwarded {signal.Signals(number).name}")

    def up_to(self, number: int) -> list[str]:
        """Wait for a signal; return the names of all that came until then."""
        while number not in self.seen:
            self.seen += os.read(self.read_end, 1)
        return [signal.Signals(seen).name for seen in self.seen]


def in_a_c_call() -> None:
    with SignalWatch(say_and_die):
        stuck()


def under_asyncio() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        came = asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR1, came.set)
        watch.reassert()  # a step boundary inside the event loop
        os.kill(os.getpid(), signal.SIGUSR1)
        await came.wait()
        say("asyncio's own signal came through")

    with SignalWatch(say_and_die) as watch:
        asyncio.run(main())
        descriptor = signal.set_wakeup_fd(-1)
        say(f"asyncio left {descriptor}")
        signal.set_wakeup_fd(descriptor)
        watch.reassert()  # the next one
        stuck()


def while_asyncio_has_the_descriptor() -> None:
    came = threading.Event()

    async def main() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: None)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.to_thread(came.wait)

    with SignalWatch(came.set) as watch:
        asyncio.run(main())
        say(f"terminated {watch.terminated}")


def chained() -> None:
    before = Before()
    calls: list[str] = []

    def own(number: int, _: Any) -> None:
        calls.append(signal.Signals(number).name)

    signal.signal(signal.SIGTERM, own)
    signal.signal(signal.SIGUSR1, own)
    came = threading.Event()
    with SignalWatch(came.set) as watch:
        os.kill(os.getpid(), signal.SIGUSR1)
        say(f"{before.up_to(signal.SIGUSR1)}, terminated {watch.terminated}")
        os.kill(os.getpid(), signal.SIGTERM)
        came.wait()
        say(f"{before.up_to(signal.SIGTERM)}, terminated {watch.terminated}")
    say(f"handlers called for {calls}")
    restored = signal.getsignal(signal.SIGTERM) is own and signal.set_wakeup_fd(-1) == before.write_end
    say(f"restored {restored}")


def handler_replaced() -> None:
    calls: list[str] = []
    came = threading.Event()
    watch = SignalWatch(came.set)
    with watch:
        former = signal.getsignal(signal.SIGTERM)

        def later(number: int, frame: Any) -> None:
            calls.append("later")
            assert callable(former)
            former(number, frame)  # chains to ours, to which ours would lead back

        signal.signal(signal.SIGTERM, later)
        watch.reassert()
        os.kill(os.getpid(), signal.SIGTERM)
        came.wait()
    say(f"called {calls}, restored {signal.getsignal(signal.SIGTERM) is later}")


def descriptor_reused() -> None:
    before = Before()
    with SignalWatch(lambda: None) as watch:
        os.close(before.write_end)
        os.close(before.read_end)
        read_end, write_end = os.pipe()  # takes the numbers
        assert {read_end, write_end} == {before.read_end, before.write_end}
        came = threading.Event()
        watch._on_terminate = came.set
        os.kill(os.getpid(), signal.SIGTERM)
        came.wait()
        os.set_blocking(read_end, False)
        try:
            say(f"a stranger got {os.read(read_end, 10)!r}")
        except BlockingIOError:
            say("no stranger got anything")
    say(f"descriptor {signal.set_wakeup_fd(-1)}")


def pool() -> None:
    before = Before()
    signal.signal(signal.SIGUSR1, lambda *_: None)
    with SignalWatch(lambda: None) as watch:
        context = multiprocessing.get_context("fork")
        for _ in range(15):
            workers = context.Pool(2)
            workers.terminate()
            workers.join()
        os.kill(os.getpid(), signal.SIGUSR1)
        # The thread serves in order: what the pools caused would have come before.
        say(f"{before.up_to(signal.SIGUSR1)}, terminated {watch.terminated}")


def fork_on(run: Callable[[Callable[[], None]], None], *, at_once: bool = False) -> None:
    before = Before()
    signal.signal(signal.SIGUSR1, lambda *_: None)

    def child(ready: int) -> None:
        say(f"child: handler {signal.getsignal(signal.SIGTERM)!r}, descriptor {signal.set_wakeup_fd(-1)}")
        say(f"child: blocks {sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))}")
        os.write(ready, b"!")
        signal.pause()

    def fork() -> None:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            child(write_end)
        if not at_once:
            os.read(read_end, 1)
        os.kill(pid, signal.SIGTERM)
        say(f"child ended with {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}")
        os.close(read_end)
        os.close(write_end)

    with SignalWatch(lambda: None) as watch:
        run(fork)
        os.kill(os.getpid(), signal.SIGUSR1)
        say(f"{before.up_to(signal.SIGUSR1)}, terminated {watch.terminated}")
        say(f"blocks {sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))}")


def fork() -> None:
    fork_on(lambda fork: fork())


def fork_and_kill_at_once() -> None:
    def run(fork: Callable[[], None]) -> None:
        for _ in range(200):
            fork()

    fork_on(run, at_once=True)


def fork_from_a_thread() -> None:
    def run(fork: Callable[[], None]) -> None:
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()

    fork_on(run)


def interrupted_twice() -> None:
    Before(say_all=True)
    with SignalWatch(lambda: say("terminated")):
        stuck()


def interrupted_once() -> None:
    before = Before()
    with SignalWatch(lambda: None) as watch:
        for _ in range(3):
            try:
                os.kill(os.getpid(), signal.SIGINT)
                while True:
                    pass  # not `pause`: the kernel may have woken the other thread, and not this one
            except KeyboardInterrupt:
                before.up_to(signal.SIGINT)
                before.seen.clear()
                say("KeyboardInterrupt")
            watch.reassert()


def dies_with_output() -> None:
    print("flushed", end="")
    reraise_sigterm()


def dies_from_a_thread() -> None:
    signal.signal(signal.SIGTERM, lambda *_: say("handler"))
    threading.Thread(target=reraise_sigterm).start()
    stuck()


def dies_though_blocked() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    reraise_sigterm()


def raising() -> None:
    def fail() -> None:
        raise OSError("no processor")

    with SignalWatch(fail) as watch:
        os.kill(os.getpid(), signal.SIGTERM)
        while watch._error is None:
            pass
        try:
            watch.reassert()
        except SwansongError as error:
            say(f"{error}")


def closed_by_another_thread(end: Callable[[], None]) -> None:
    watch = SignalWatch(lambda: say("terminated"))
    watch.__enter__()
    closer = threading.Thread(target=watch.close)
    closer.start()
    closer.join()
    end()


def closed_elsewhere() -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

    closed_by_another_thread(die)


def closed_elsewhere_and_stuck() -> None:
    closed_by_another_thread(stuck)


def terminated_while_closing() -> None:
    really = signal.set_wakeup_fd

    def set_wakeup_fd(descriptor: int) -> int:
        former = really(descriptor)
        os.kill(os.getpid(), signal.SIGTERM)  # no descriptor any more, and the handler still ours
        return former

    with SignalWatch(lambda: say("terminated")):
        signal.set_wakeup_fd = set_wakeup_fd  # type: ignore[assignment]
    say("closed")


def closed_with_a_handler_that_takes_over() -> None:
    watch = SignalWatch(lambda: say("terminated"))
    with watch:
        signal.signal(signal.SIGTERM, lambda *_: say("later handler"))
        other = Before()
    say(f"descriptor kept {signal.set_wakeup_fd(-1) == other.write_end}")
    os.kill(os.getpid(), signal.SIGTERM)


def twice() -> None:
    calls: list[int] = []
    before = Before()
    with SignalWatch(lambda: calls.append(1)):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            before.up_to(signal.SIGTERM)
            before.seen.clear()
    say(f"called {len(calls)} times")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
