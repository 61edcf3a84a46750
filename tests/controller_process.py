"""A controller in a process of its own, for tests: `controller_process.py WORLD_SIZE` prints its port."""

from __future__ import annotations

import sys

from engine_support import INCARNATION, TOKEN, Store
from swansong.engine.address import resolve
from swansong.engine.controller import ControllerServer
from swansong.protocol.options import ProtocolOptions


def main() -> None:
    with ControllerServer(
        resolve("127.0.0.1", 0),
        world_size=int(sys.argv[1]),
        token=TOKEN,
        incarnation=INCARNATION,
        store=Store().calls,
        options=ProtocolOptions(reconnect_s=60.0, exit_grace_s=2.0),
    ) as server:
        print(server.port, flush=True)
        print(server.run(), flush=True)


if __name__ == "__main__":
    main()
