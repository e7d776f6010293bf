# SPDX-License-Identifier: Apache-2.0
"""More than one gloo group without a race.

Paddle 3.3 publishes the addresses of every gloo group under the same keys of one store: a process that is a little
ahead reads those of the group before, and the connection is refused or never made. With two processes that is rare,
with four nearly certain. Here every group gets a store of its own.
"""

from __future__ import annotations

import os

from paddle.base import core
from paddle.distributed import collective

_stores = []


def separate_stores() -> None:
    """Makes `new_group`, and so fleet, use one store per group; ports come from the launcher."""
    ports = [int(port) for port in os.environ["TEST_STORE_PORTS"].split(",")]
    create = collective._new_process_group_impl
    taken: dict[int, int] = {}

    def with_own_store(backend, store, rank, world_size, group_name, pg_options, group_id=0, **options):
        port = ports[taken.setdefault(group_id, group_id % len(ports))]
        _stores.append(core.TCPStore("127.0.0.1", port, rank == 0, world_size, 60))
        return create(backend, _stores[-1], rank, world_size, group_name, pg_options, group_id=group_id, **options)

    collective._new_process_group_impl = with_own_store
