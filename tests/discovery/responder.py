"""A DNS server on loopback that knows what it is told."""

import socket
import threading

import dns.message
import dns.rcode
import dns.rrset


class Responder:
    """`records` by (name, type), each `(ttl, *texts)`; names without records do not exist. `silent`: no answers."""

    def __init__(self):
        self.records = {}
        self.silent = False
        self.asked = 0
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *details):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"", self._socket.getsockname())
        self._thread.join()
        self._socket.close()

    def _serve(self):
        while True:
            wire, client = self._socket.recvfrom(4096)
            if not wire:
                return
            self.asked += 1
            if not self.silent:
                self._socket.sendto(self._answer(dns.message.from_wire(wire)).to_wire(), client)

    def _answer(self, query):
        answer = dns.message.make_response(query)
        (question,) = query.question
        name, kind = question.name.to_text(omit_final_dot=True), question.rdtype.name
        found = self.records.get((name, kind))
        if found:
            answer.answer.append(dns.rrset.from_text(question.name, found[0], "IN", kind, *found[1:]))
        elif not any(known == name for known, _ in self.records):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        return answer
