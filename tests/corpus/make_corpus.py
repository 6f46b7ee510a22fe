"""Makes the named inputs of the fuzz targets. The ones named by a hash were found by libFuzzer, and
kept because they reach what no other input does. Run it in any directory:

    python3 tests/corpus/make_corpus.py
"""

import io
import os
import random
import struct
import tarfile
import zlib

HERE = os.path.dirname(os.path.abspath(__file__))


def write(target, name, data):
    os.makedirs(os.path.join(HERE, target), exist_ok=True)
    with open(os.path.join(HERE, target, name), "wb") as file:
        file.write(data)


def deflate(data, level=6, strategy=zlib.Z_DEFAULT_STRATEGY):
    c = zlib.compressobj(level, zlib.DEFLATED, -15, 8, strategy)
    return c.compress(data) + c.flush()


def inflate():
    """What follows a stored block that is not the last: whole streams, all kinds of blocks."""
    r = random.Random(1)
    noise = r.randbytes(300)
    contents = {
        "empty": b"",
        "zeros": bytes(3000),
        "text": b"the quick brown fox jumps over the lazy dog. " * 9,
        "noise": noise,
        "skew": bytes(min(255, int(r.expovariate(0.1))) for _ in range(600)),
        "four": bytes(r.randrange(4) for _ in range(600)),
        "far": noise + bytes(400) + noise,
        "words": b"".join(struct.pack("<f", r.choice([0, 1, 0.5, r.random()])) for _ in range(200)),
    }
    ways = {"default": (6, 0), "stored": (0, 0), "fixed": (6, zlib.Z_FIXED),
            "huffman": (6, zlib.Z_HUFFMAN_ONLY), "rle": (6, zlib.Z_RLE)}
    for content, data in contents.items():
        for way, (level, strategy) in ways.items():
            if way in ("default", "huffman") or content in ("text", "empty"):
                write("inflate", f"{content}_{way}", deflate(data, level, strategy))
    c = zlib.compressobj(6, zlib.DEFLATED, -15)
    parts = [c.compress(noise[:90]), c.flush(zlib.Z_FULL_FLUSH), c.compress(bytes(500)),
             c.flush(zlib.Z_SYNC_FLUSH), c.compress(contents["text"]), c.flush()]
    write("inflate", "flushes", b"".join(parts))


def npy():
    """A byte that says how to frame it, and the text of a header; or a file."""
    texts = {
        "plain": "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }",
        "fortran": "{'descr': '>i2', 'fortran_order': True, 'shape': (2, 3, 2), }",
        "scalar": "{'descr': '<c16', 'fortran_order': False, 'shape': (), }",
        "empty": "{'descr': '<f8', 'fortran_order': False, 'shape': (0, 7), }",
        "python2": "{'descr': '<i8', 'fortran_order': False, 'shape': (4L,), }",
        "quotes": '{"shape": (5,), "descr": "|S3", "fortran_order": False}\n',
        "time": "{'descr': '<M8[25us]', 'fortran_order': False, 'shape': (2,), }",
        "unicode": "{'descr': '>U2', 'fortran_order': False, 'shape': (2,), }",
        "object": "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
        "fields": "{'descr': [('a', '<f4'), ('b', '|u1', (3,)), ('', '|V1')], "
                  "'fortran_order': False, 'shape': (2,), }",
        "nested": "{'descr': [(('t', 'p'), [('x', '>i2'), ('y', '<i2', (2, 2))], (2,)), "
                  "('q', '<f8')], 'fortran_order': False, 'shape': (1,), }",
        "negative": "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }",
        "huge": "{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296), }",
        "zero_huge": "{'descr': '<f4', 'fortran_order': False, 'shape': (0, 9223372036854775807)}",
        "deep": "{'descr': " + "[('a', " * 18 + "'<f4'" + ")]" * 18 + ", 'fortran_order': False}",
        "twice": "{'descr': '<f4', 'descr': '<f8', 'fortran_order': False, 'shape': (1,), }",
        "many_dims": "{'descr': '|u1', 'fortran_order': False, 'shape': (" + "1, " * 64 + "), }",
    }
    for i, (name, text) in enumerate(texts.items()):
        write("npy", name, bytes([2 * (i % 3) + i % 2]) + text.encode())
    text = texts["plain"].encode().ljust(117) + b"\n"
    write("npy", "file", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(48))


def entry(name, offset, size=160, crc=0, method=0, flags=0, extra=b"", comment=b"", csize=None):
    return struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, 20, 20, flags, method, 0, 0x21, crc,
                       size if csize is None else csize, size, len(name), len(extra), len(comment),
                       0, 0, 0, offset) + name + extra + comment


def directory():
    """A byte that says what stands around it, and the entries; three members lie in front."""
    def member(i):
        data = (b"\x93NUMPY\x01\x00\x76\x00" + b"{'descr': '|u1', 'fortran_order': False, "
                b"'shape': (32,), }").ljust(127) + b"\n" + bytes([120 + i]) * 32
        return zlib.crc32(data)

    names = [b"x.npy", b"y.npy", b"z"]
    offsets = [0, 195, 390]
    good = [entry(n, o, crc=member(i)) for i, (n, o) in enumerate(zip(names, offsets))]
    all_three = b"".join(good)
    wide = struct.pack("<HHQQQ", 1, 24, 160, 160, 0)
    saturated = entry(b"x.npy", 0xFFFFFFFF, 0xFFFFFFFF, member(0), extra=wide)
    write("directory", "good", b"\xc0" + all_three)
    write("directory", "two", b"\x80" + good[1] + good[0])
    write("directory", "prefix", b"\xce" + all_three)
    write("directory", "twice", b"\x80" + good[0] + good[0])
    write("directory", "comment", b"\x40" + entry(b"x.npy", 0, crc=member(0), comment=b"hello"))
    extra = b"\x35\xd9\x01\x00a"
    write("directory", "extra", b"\x40" + entry(b"x.npy", 0, crc=member(0), extra=extra))
    write("directory", "wide", b"\x40" + saturated)
    write("directory", "overlap", b"\x80" + good[0] + entry(b"y.npy", 1))
    write("directory", "deflated", b"\x40" + entry(b"x.npy", 0, method=8))
    write("directory", "encrypted", b"\x40" + entry(b"x.npy", 0, flags=1))
    write("directory", "bad_crc", b"\x40" + entry(b"x.npy", 0, crc=1))
    write("directory", "lies", b"\x40" + entry(b"x.npy", 0, size=0x7FFFFFFF))
    end64 = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, 3, 3, len(all_three), 584)
    locator = struct.pack("<IIQI", 0x07064B50, 0, 584 + len(all_three), 1)
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    write("directory", "zip64", b"\x10" + all_three + end64 + locator + end)
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 3, 3, len(all_three), 584, 7) + b"comment"
    write("directory", "with_end", b"\x10" + all_three + end)
    write("directory", "behind", b"\x30" + all_three + end)


def roundtrip():
    r = random.Random(2)
    for i in range(12):
        write("roundtrip", f"seed_{i:02}", bytes([i * 21 % 256]) + r.randbytes(20 + 12 * i))


def npz():
    write("npz", "none", struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 0, 0, 0, 0, 0))


def text():
    field = b" table=0123456789abcdef item_seed=0 data=0 epoch=1 item=3 results=0 batch=1 drops=0"
    write("text", "state", b"\x02spdl.state.1" + field + b" delivered=3")
    write("text", "state_ranks", b"\x1espdl.state.1" + field + b" delivered=3 rank=0/2 from=0:0")
    for way in (0x22, 0x26, 0x32, 0x36, 0x3E):
        write("text", f"edits_{way:02x}", bytes([way]) + b"\x20\x31\x28\x39\x31\x00\x3a\x35" * 3)
    settings = [b"5", b"1,replay,raise", b"1", b"4", b"trace.json,events=64", b"read", b"decode"]
    write("text", "environment", b"\x01" + b"\n".join(settings))
    odd = [b'a"b\\c\x01\x7f', b"\xff\xc3\xa9\xed\xa0\x80"]
    names = [b"0.01", b"60", b"x", b"-1", b"t,events=9"] + odd
    write("text", "environment_odd", b"\x01" + b"\n".join(names))


def files():
    """A byte that says what the rest is: see tests/fuzz_files.c."""
    members = [("a/1.img", b"image" * 30), ("a/1.cls", b"7"), ("b" * 120 + "/2.img", bytes(600))]
    for name, form in (("ustar", tarfile.USTAR_FORMAT), ("pax", tarfile.PAX_FORMAT),
                       ("gnu", tarfile.GNU_FORMAT)):
        raw = io.BytesIO()
        with tarfile.open(fileobj=raw, mode="w", format=form) as tar:
            for path, data in members:
                member = tarfile.TarInfo(path)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
                member.type = tarfile.SYMTYPE
                tar.addfile(member)
            end = tar.offset + 1024
        data = raw.getvalue()[:end]
        for way in (0x00, 0x10, 0x20, 0x38):
            write("files", f"{name}_{way:02x}", bytes([way]) + data)
    write("files", "lines", b"\x01one\r\ntwo\n\n\r\nlast" + b"x" * 990)
    write("files", "list", b"\x05none\n\r\n.\n")


for target in (inflate, npy, directory, roundtrip, npz, files, text):
    target()
