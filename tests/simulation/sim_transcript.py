"""Messages, events and effects in few words."""

from __future__ import annotations

from swansong.protocol import messages as m


def shown(value: object) -> str:
    """One line for a message, an event or an effect."""
    match value:
        case m.Received(connection, message):
            return f"[{connection}] {shown(message)}"
        case m.FromController(message):
            return f"< {shown(message)}"
        case m.Tell(message):
            return f"> {shown(message)}"
        case m.Send(connection, message):
            return f"[{connection}] > {shown(message)}"
        case m.LocalFault(fault) | m.FaultReport(fault=fault):
            return f"{type(value).__name__}({_fault(fault)})"
        case m.Wake(release):
            return f"Wake({shown(release)})"
        case m.Register() | m.StateRead() | m.StateReport() | m.Release() | m.World():
            return _long(value)
    fields = [getattr(value, name) for name in getattr(value, "__struct_fields__", ())]
    return f"{type(value).__name__}({', '.join(_field(field) for field in fields)})"


def _long(value: m.Register | m.StateRead | m.StateReport | m.Release | m.World) -> str:
    match value:
        case m.World():
            return "World(...)"
        case m.Register():
            said = [f"rank {value.member.rank}"]
            said += ["knows the world"] if value.world else []
            said += [f"left: {list(value.left)}"] if value.left else []
            said += ["gate closed"] if value.frozen else []
            said += [_fault(value.fault)] if value.fault else []
        case m.Release():
            said = [value.outcome, value.action]
            said += [f"step {value.step}"] if value.step is not None else []
            said += [value.reason] if value.reason else []
        case _:
            said = [
                f"{key} whole at {h.step}" if h.step is not None else f"{key} not whole"
                for key, h in value.held.items()
            ]
            said += [] if value.settled else ["not settled"]
            said += [f"boundary {value.boundary}", value.main]
    return f"{type(value).__name__}({', '.join(said)})"


def _fault(fault: m.Fault) -> str:
    return (
        f"{fault.kind}, rank {fault.rank}: {fault.what}" if fault.rank >= 0 else f"{fault.kind}: {fault.what}"
    )


def _field(field: object) -> str:
    return ", ".join(map(str, field)) if isinstance(field, tuple) else str(field)
