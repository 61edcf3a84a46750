"""The machines by hand: a job whose ranks say what a test wants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from swansong.policy.cut import Held
from swansong.protocol import messages as m
from swansong.protocol.controller import Controller
from swansong.protocol.messages import Fault, FaultKind
from swansong.protocol.options import ProtocolOptions
from swansong.protocol.processor import Processor

OPTIONS = ProtocolOptions()


def member(rank: int, keys: Iterable[str] = ("model",), *, pid: int | None = None) -> m.Member:
    """A rank's registration."""
    components = tuple(m.ComponentEntry(key=key, label=key, nbytes=1) for key in keys)
    return m.Member(
        rank=rank, host="host", pid=100 + rank if pid is None else pid, start_time=1, components=components
    )


def members(layout: Sequence[Sequence[str]]) -> tuple[m.Member, ...]:
    """A world map."""
    return tuple(member(rank, keys) for rank, keys in enumerate(layout))


def raised(rank: int, step: int | None = 1) -> Fault:
    """An exception of a rank."""
    return Fault(kind=FaultKind.RAISED, rank=rank, what="ValueError: no", step=step)


def stalled(rank: int, step: int | None = 1) -> Fault:
    """A stall of a rank."""
    return Fault(kind=FaultKind.STALLED, rank=rank, step=step)


class Job:
    """A controller and what its ranks say. Connection 10 + rank is a rank's, until it is on another."""

    def __init__(
        self, layout: Sequence[Sequence[str]] = (("model",),) * 3, options: ProtocolOptions = OPTIONS
    ) -> None:
        self.layout, self.now = layout, 0.0
        self.controller = Controller(len(layout), 1, "i", options, self.now)
        self.connections = {rank: 10 + rank for rank in range(len(layout))}
        self.effects: list[m.ControllerEffect] = []

    @classmethod
    def trained(
        cls, layout: Sequence[Sequence[str]] = (("model",),) * 3, options: ProtocolOptions = OPTIONS
    ) -> Job:
        """A job whose world is complete."""
        job = cls(layout, options)
        for rank in range(len(layout)):
            job.register(rank)
        return job

    @classmethod
    def successor(cls, layout: Sequence[Sequence[str]], back: Iterable[int], **details: object) -> Job:
        """A job whose controller was started anew, and some of whose ranks have come back."""
        job = cls(layout)
        for rank in back:
            job.register(rank, world=members(layout), **details)
        return job

    # -- what happens ---------------------------------------------------------------------------------

    def take(self, event: m.ControllerEvent) -> list[m.ControllerEffect]:
        """Give the controller an event."""
        self.effects = self.controller.handle(event, self.now)
        return self.effects

    def register(
        self, rank: int, *, connection: int | None = None, **details: object
    ) -> list[m.ControllerEffect]:
        """A rank registers."""
        if connection is not None:
            self.connections[rank] = connection
        register = m.Register(member=member(rank, self.layout[rank]), world_size=len(self.layout), **details)  # type: ignore[arg-type]
        return self.take(m.Received(self.connections[rank], register))

    def say(self, rank: int, message: m.ToController) -> list[m.ControllerEffect]:
        """A rank says something."""
        return self.take(m.Received(self.connections[rank], message))

    def fault(self, fault: Fault) -> list[m.ControllerEffect]:
        """A rank reports a fault."""
        return self.say(fault.rank, m.FaultReport(fault=fault))

    def report(
        self,
        rank: int,
        step: int | None,
        *,
        settled: bool = True,
        boundary: int | None = 1,
        values: str = "v",
    ) -> list[m.ControllerEffect]:
        """A rank reports all its components at one step; None: inside an update."""
        held = {key: Held(step, values if step is not None else "") for key in self.layout[rank]}
        return self.say(
            rank,
            m.StateReport(
                incident=self.incident, held=held, settled=settled, boundary=boundary, main="somewhere"
            ),
        )

    def leave(self, rank: int) -> list[m.ControllerEffect]:
        """A rank's connection ends."""
        return self.take(m.Disconnected(self.connections[rank]))

    def later(self, seconds: float) -> list[m.ControllerEffect]:
        """Time passes, and the controller is called at each of its deadlines."""
        until, effects, calls = self.now + seconds, list[m.ControllerEffect](), 0
        while self.controller.deadline is not None and self.controller.deadline <= until:
            calls += 1
            assert calls < 10_000, f"ticks without end at {self.now}"
            self.now = self.controller.deadline
            effects += self.take(m.Tick())
        self.now, self.effects = until, effects
        return effects

    # -- what came out --------------------------------------------------------------------------------

    @property
    def incident(self) -> str:
        """Name of the incident under way, or of the first."""
        return self.controller.incident.id if self.controller.incident is not None else "i-1"

    def told(self, rank: int) -> list[m.ToProcessor]:
        """What a rank was just told."""
        return [
            e.message
            for e in self.effects
            if isinstance(e, m.Send) and e.connection == self.connections[rank]
        ]

    def orders(self) -> dict[int, m.Save]:
        """Rank -> what it was just told to save."""
        found = {rank: [x for x in self.told(rank) if isinstance(x, m.Save)] for rank in self.connections}
        return {rank: saves[0] for rank, saves in found.items() if saves}

    def just(self, kind: type) -> list[object]:
        """Effects of a kind that just came out."""
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def done(self, rank: int, attempt: int) -> list[m.ControllerEffect]:
        """A saver says that its part is durable."""
        return self.say(rank, m.PartDone(incident=self.incident, attempt=attempt))

    def failed(self, rank: int, attempt: int, *, moved: bool = False) -> list[m.ControllerEffect]:
        """A saver says that it cannot."""
        failure = m.PartFailed(incident=self.incident, attempt=attempt, reason="disk full", moved=moved)
        return self.say(rank, failure)


class Rank:
    """A processor and what it hears."""

    def __init__(self, options: ProtocolOptions = OPTIONS, rank: int = 0) -> None:
        self.now = 0.0
        self.machine = Processor(member(rank), 2, options, self.now)
        self.effects: list[m.ProcessorEffect] = []

    @classmethod
    def trained(cls, options: ProtocolOptions = OPTIONS) -> Rank:
        """A rank that is protected."""
        rank = cls(options)
        rank.take(m.Tick())
        rank.take(m.Connected())
        rank.hear(m.Welcome(generation=1))
        rank.hear(m.World(members=members((("model",), ("model",)))))
        return rank

    @classmethod
    def frozen(cls, options: ProtocolOptions = OPTIONS) -> Rank:
        """A rank whose gate is closed."""
        rank = cls.trained(options)
        rank.hear(m.Freeze(incident="i"))
        return rank

    def take(self, event: m.ProcessorEvent) -> list[m.ProcessorEffect]:
        """Give the processor an event."""
        self.effects = self.machine.handle(event, self.now)
        return self.effects

    def hear(self, message: m.ToProcessor) -> list[m.ProcessorEffect]:
        """The controller says something."""
        return self.take(m.FromController(message))

    def later(self, seconds: float) -> list[m.ProcessorEffect]:
        """Time passes, and the processor is called at each of its deadlines."""
        until, effects = self.now + seconds, list[m.ProcessorEffect]()
        while self.machine.deadline is not None and self.machine.deadline <= until:
            self.now = self.machine.deadline
            effects += self.take(m.Tick())
        self.now, self.effects = until, effects
        return effects

    def reconnected(self, generation: int = 1) -> list[m.ProcessorEffect]:
        """It lost its connection and has another, and a welcome."""
        self.take(m.ConnectionEnded())
        self.later(1.0)
        effects = self.take(m.Connected())
        self.hear(m.Welcome(generation=generation))
        return effects

    def said(self) -> list[m.ToController]:
        """What was just said to the controller."""
        return [effect.message for effect in self.effects if isinstance(effect, m.Tell)]
