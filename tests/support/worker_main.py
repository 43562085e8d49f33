"""A worker in a process of its own, told what to do by JSON lines on standard input: so that tests can kill it."""

import json
import sys
from dataclasses import asdict

import numpy as np

from kvd.bench.spec import flat_spec
from kvd.client import Blocks, Worker
from kvd.errors import KvdError
from kvd.limits import MIB
from tests.support.patience import PATIENCE
from tests.support.pools import content_of


class Remote:
    """Executes the orders; `pool` is uint8 [blocks, block_bytes]."""

    def attach(self, socket, name, blocks, block_bytes, timeout=PATIENCE):
        self.worker = Worker.attach(socket, name=name, spec=flat_spec(blocks, block_bytes), timeout=timeout)
        self.pool = content_of(self.worker, blocks * block_bytes).reshape(blocks, block_bytes)
        return {
            "kept": self.worker.kept,
            "backing": self.worker.backing,
            "device": self.worker.device,
            "incarnation": self.worker.incarnation,
        }

    def fill(self, ids, value):
        self.pool[ids] = value

    def clear(self):
        self.pool[:] = 0

    def values(self, ids):
        """The one value that each block holds, or -1 where its bytes differ from each other."""
        values = []
        for some in self._some(ids):
            blocks = self.pool[some]
            same = (blocks == blocks[:, :1]).all(axis=1)
            values += [int(block[0]) if equal else -1 for block, equal in zip(blocks, same, strict=True)]
        return values

    def last_bytes(self, ids):
        """The last byte of each block: much less work than its `values`, for whoever waits for it."""
        return self.pool[ids, -1].tolist()

    def _some(self, ids):
        """A MiB of them at a time, which stays in the cache."""
        step = max(1, MIB // self.pool.shape[1])
        return (ids[at : at + step] for at in range(0, len(ids), step))

    def untouched(self, ids, value):
        """Whether every byte outside of these blocks is `value`."""
        mask = np.ones(len(self.pool), dtype=bool)
        mask[ids] = False
        return all((self.pool[some] == value).all() for some in self._some(np.flatnonzero(mask)))

    def offer(self, name, ids, ttl=PATIENCE):
        blocks = [Blocks(group=0, first=0, ids=ids)]
        return self.worker.offer(name, tokens=16 * len(ids), blocks=blocks, ttl=ttl, timeout=PATIENCE)

    def pull(self, name, ticket, ids, timeout=PATIENCE, traceparent=None):
        blocks = [Blocks(group=0, first=0, ids=ids)]
        self.worker.pull(name, ticket, blocks=blocks, timeout=timeout, traceparent=traceparent)

    def cancel(self, name):
        self.worker.cancel(name)

    def wait(self, timeout):
        found = []
        for event in self.worker.wait(timeout):
            fields = {key: value for key, value in asdict(event).items() if key != "blocks"}
            found.append({"kind": type(event).__name__, **fields})
        return found

    def status(self):
        return self.worker.status(PATIENCE)

    def close(self):
        self.worker.close()

    def detach(self):
        self.worker.detach(PATIENCE)


def main():
    remote = Remote()
    for line in sys.stdin:
        order, arguments = json.loads(line)
        try:
            answer = {"ok": getattr(remote, order)(**arguments)}
        except KvdError as error:
            answer = {"error": error.code, "text": error.text}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
