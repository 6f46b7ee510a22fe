#!/usr/bin/env python3
"""A small HTTP/1.1 server for examples/http_fetch.c: answers after 20 ms, and keeps connections.

http_server.py COMMAND ARGS... runs the command, with PORT in its arguments replaced, and ends with
it. Paths end in a number. Those that end in 57 get a 500 the first time, 33, 233, 433, 633 and 833
no answer the first time, 777 gets a 500 every time."""
import asyncio
import re
import sys

seen = set()


def fault(path):
    """'500', 'stall', or None when the path is answered as it should be."""
    number = int((re.search(rb"(\d+)$", path) or [b"0", b"0"])[1])
    if number == 777:
        return "500"
    if path in seen:
        return None
    seen.add(path)
    if number % 100 == 57:
        return "500"
    return "stall" if number < 1000 and number % 200 == 33 else None


class Connection(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
        self.data = b""

    def data_received(self, data):
        self.data += data
        while b"\r\n\r\n" in self.data:
            request, self.data = self.data.split(b"\r\n\r\n", 1)
            self.answer(request.split(b" ", 2)[1])

    def answer(self, path):
        what = fault(path)
        if what == "stall":
            return
        body = b"no luck\n" if what else b"this is " + path + b"\n"
        status = b"500 Internal Server Error" if what else b"200 OK"
        text = b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)
        asyncio.get_running_loop().call_later(0.02, self.send, text)

    def send(self, text):
        if not self.transport.is_closing():
            self.transport.write(text)


async def main(command):
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Connection, "127.0.0.1", 0, backlog=1024)
    port = str(server.sockets[0].getsockname()[1])
    process = await asyncio.create_subprocess_exec(*[x.replace("PORT", port) for x in command])
    return await process.wait()


sys.exit(asyncio.run(main(sys.argv[1:])))
