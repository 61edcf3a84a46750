"""What the tests of the engine's controller have in common: a server, a store that remembers, ranks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from swansong.engine.address import Address, resolve
from swansong.engine.controller import ControllerServer
from swansong.engine.guests import Limits
from swansong.engine.inquiry import ask
from swansong.engine.processes import host_name, start_time
from swansong.engine.storekeeper import StoreCalls
from swansong.engine.transport import Connection, connect
from swansong.policy.cut import Held
from swansong.protocol import messages as m
from swansong.protocol.handshake import Identity, Role, Token
from swansong.protocol.operator import Status, StatusRequest
from swansong.protocol.options import ProtocolOptions

TOKEN = Token(bytes(range(32)))
OTHER_TOKEN = Token(b"the token of quite another job..")
INCARNATION = b"this start......"
PATIENCE_S = 20.0
"""How long a test waits for what should come at once; only a failing test waits for so long."""
QUICK = ProtocolOptions(reconnect_s=0.4, freeze_timeout_s=2.0, settle_timeout_s=1.0, exit_grace_s=2.0)
PATIENT = ProtocolOptions(reconnect_s=60.0, reregister_timeout_s=60.0, exit_grace_s=2.0)
"""Nobody is given up for being absent while a test runs."""

T = TypeVar("T")


@dataclass
class Store:
    """What a controller asked of its store, in order."""

    asked: list[Any] = field(default_factory=list)
    may_prepare: threading.Event = field(default_factory=threading.Event)
    fails: dict[str, str] = field(default_factory=dict)
    """Call -> what it raises."""

    def __post_init__(self) -> None:
        self.may_prepare.set()

    @property
    def calls(self) -> StoreCalls:
        return StoreCalls(prepare=self.prepare, commit=self.commit, discard=self.discard, report=self.report)

    def kinds(self) -> list[str]:
        return [name for name, _ in self.asked]

    def prepare(self, incident: str, step: int) -> None:
        self.may_prepare.wait(PATIENCE_S)
        self._note("prepare", step)

    def commit(self, order: m.Commit) -> str:
        self._note("commit", order)
        return f"/checkpoints/step-{order.step}"

    def discard(self, incident: str) -> None:
        self._note("discard", incident)

    def report(self, report: m.Report) -> None:
        self._note("report", report)

    def _note(self, name: str, what: Any) -> None:
        self.asked.append((name, what))
        if name in self.fails:
            raise OSError(self.fails[name])


@dataclass
class Served:
    """A controller that runs in a thread."""

    server: ControllerServer
    address: Address
    store: Store
    notes: list[str]
    reason: str = ""
    """Why it closed."""
    crash: BaseException | None = None
    """What ended it that should not have."""
    thread: threading.Thread | None = None

    def wait_closed(self) -> str:
        assert self.thread is not None
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive(), "the controller did not close"
        return self.reason


@contextmanager
def serve(world_size: int, *, host: str = "127.0.0.1", port: int = 0, **given: Any) -> Iterator[Served]:
    store = given.pop("store", None) or Store()
    notes: list[str] = []
    arguments: dict[str, Any] = {"token": TOKEN, "incarnation": INCARNATION, "options": QUICK} | given
    arguments.setdefault("limits", Limits(linger_s=0.2))
    server = ControllerServer(
        resolve(host, port), world_size=world_size, store=store.calls, note=notes.append, **arguments
    )
    with server:
        served = Served(server, resolve(host, server.port), store, notes)

        def run() -> None:
            try:
                served.reason = server.run()
            except BaseException as error:
                served.crash = error

        served.thread = threading.Thread(target=run)
        served.thread.start()
        try:
            yield served
        finally:
            server.stop("the test is over")
            served.thread.join(PATIENCE_S)
        if served.crash is not None:
            raise served.crash


def until(what: Callable[[], T]) -> T:
    """Wait until something is true; its value."""
    ends = time.monotonic() + PATIENCE_S
    while not (value := what()):
        assert time.monotonic() < ends, "it did not come to be"
        time.sleep(0.005)
    return value


def member(rank: int, *, pid: int | None = None, keys: tuple[str, ...] = ("model",)) -> m.Member:
    pid = pid or os.getpid()
    entries = tuple(m.ComponentEntry(key=key, label=key, nbytes=100) for key in keys)
    return m.Member(rank=rank, host=host_name(), pid=pid, start_time=start_time(pid), components=entries)


class Rank:
    """A rank that says only what a test has it say."""

    def __init__(self, served: Served | Address, rank: int, **given: Any) -> None:
        address = served.address if isinstance(served, Served) else served
        self.number = rank
        self.member = member(rank, **{key: given.pop(key) for key in ("pid", "keys") if key in given})
        me = Identity(
            role=Role.RANK,
            rank=rank,
            incarnation=given.pop("incarnation", INCARNATION),
            generation=given.pop("generation", -1),
        )
        token, tls = given.pop("token", TOKEN), given.pop("tls", None)
        assert not given
        self.connection: Connection = connect(address, token, me, timeout_s=PATIENCE_S, tls=tls)

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def say(self, message: m.ToController) -> None:
        self.connection.send(message)

    def register(self, world_size: int, **given: Any) -> None:
        self.say(m.Register(member=self.member, world_size=world_size, **given))

    def hear(self, kind: type[T]) -> T:
        """The next message of a kind; others are passed over."""
        while True:
            message = self.connection.receive(PATIENCE_S)
            assert message is not None, f"rank {self.number} heard no {kind.__name__}"
            if isinstance(message, kind):
                return message

    def report(self, incident: str, step: int) -> None:
        held = {entry.key: Held(step, "v") for entry in self.member.components}
        self.say(m.StateReport(incident=incident, held=held, settled=True, boundary=step, main="in forward"))

    def save(self) -> m.Save:
        """Hear an order, and carry it out."""
        order = self.hear(m.Save)
        self.say(m.PartDone(incident=order.incident, attempt=order.attempt))
        return order


def register_all(served: Served, ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.register(len(ranks))
    for rank in ranks:
        rank.hear(m.World)


@contextmanager
def world(served: Served, size: int, **given: Any) -> Iterator[list[Rank]]:
    """So many ranks, registered, all in this process."""
    ranks = [Rank(served, rank, **given) for rank in range(size)]
    try:
        register_all(served, ranks)
        yield ranks
    finally:
        for rank in ranks:
            rank.connection.close()


def finish_incident(ranks: list[Rank], step: int) -> m.Release:
    """Have every rank report a step, the chosen one save, and all hear how it ended."""
    for rank in ranks:
        rank.report(rank.hear(m.Freeze).incident, step)
    ranks[0].save()  # the lowest holder is the least loaded of equals
    releases = [rank.hear(m.Release) for rank in ranks]
    return releases[0]


def status(served: Served) -> Status:
    """What an operator is told."""
    answer = ask(served.address, TOKEN, StatusRequest(), timeout_s=20)
    assert isinstance(answer, Status)
    return answer
