"""A process that contends for leases: one command a line on stdin, one answer a line on stdout.

`take KEY AT` tries at the monotonic clock's time AT and answers `held` or `refused REASON`; `drop` lets go.
"""

from __future__ import annotations

import sys
import time

from dflash_core.errors import LeaseHeldError
from dflash_core.store.artifacts import Lease, Store


def main(location: str) -> None:
    store = Store.open(location)
    lease: Lease | None = None
    print("ready", flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "take":
            lease = store.lease(arguments[0])
            while time.monotonic() < float(arguments[1]):
                pass
            try:
                lease.__enter__()
            except LeaseHeldError as error:
                lease = None
                print(f"refused {error}", flush=True)
            else:
                print("held", flush=True)
        elif lease is not None:
            lease.__exit__(None, None, None)
            lease = None


if __name__ == "__main__":
    main(sys.argv[1])
