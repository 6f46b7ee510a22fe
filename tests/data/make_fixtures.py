"""Makes the .npy and .npz files of this directory. Needs Python >= 3.11.4 and NumPy >= 2; the
files are in the repository, so the tests need neither. Run it in any directory:

    python3 tests/data/make_fixtures.py

The bytes of an array follow from its name and its length, so that test_npz.c can make them again:
see pattern() here and there. Files made by hand (broken ones above all) are made by the tests.
"""

import io
import os
import zipfile
import zlib

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))


def path(name):
    return os.path.join(HERE, name)


def lcg(count):
    """The high bytes of a linear congruential generator: no two neighbours have much in common."""
    state, out = 12345, bytearray()
    for _ in range(count):
        state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
        out.append(state >> 24)
    return bytes(out)


def pattern(kind, count):
    """The content of a member whose name begins with `kind`."""
    if kind == "zeros":
        return bytes(count)
    if kind == "lcg":
        return lcg(count)
    if kind == "skew":  # 16 values, the small ones often: a code with many lengths
        return bytes((b & 15) * (b >> 4) >> 4 for b in lcg(count))
    if kind.startswith("far"):  # far30000: noise that comes again after so many bytes
        period = int(kind[3:])
        return (lcg(period) * (count // period + 1))[:count]
    if kind.startswith("near"):  # near3: distance 3
        return pattern("far" + kind[4:], count)
    return bytes((7 * i + (i >> 8)) & 255 for i in range(count))  # every other name


def array(dtype, shape=(5, 3), order="C"):
    dtype = np.dtype(dtype)
    data = pattern("", int(np.prod(shape, dtype=int)) * dtype.itemsize)
    if dtype.kind == "b":
        data = bytes(b & 1 for b in data)
    if dtype.kind == "U":  # code points, of which 0x10ffff is the last
        data = bytes(b if i % 4 == 0 else 0 for i, b in enumerate(data))
    return np.ndarray(shape, dtype, data, order=order)


DTYPES = """b1 i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 f16 c8 c16 c32 S5 U3 V3 M8[ns] m8[25s]""".split()


def dtypes():
    arrays = {name.split("[")[0]: array(name) for name in DTYPES}
    np.savez(path("dtypes_stored.npz"), **arrays)
    np.savez_compressed(path("dtypes_deflated.npz"), **arrays)
    swapped = ("i2", "u4", "i8", "f4", "f8", "c16", "U3", "M8[s]")
    big = {name.split("[")[0]: array(">" + name) for name in swapped}
    np.savez_compressed(path("big_endian.npz"), **big)


def shapes():
    arrays = {
        "zero_d": array("f8", ()),
        "empty": array("i4", (0,)),
        "empty_middle": array("i4", (3, 0, 2)),
        "vector": array("u2", (7,)),
        "dims24": array("u1", (2,) + (1,) * 22 + (3,)),
        "most_dims": array("u1", (2,) + (1,) * 62 + (3,)),
        "fortran": array("i4", (3, 4), "F"),
        "fortran3": array("f8", (2, 3, 4), "F"),
    }
    np.savez(path("shapes_stored.npz"), **arrays)
    np.savez_compressed(path("shapes_deflated.npz"), **arrays)


def npy_files():
    counting = np.arange(12, dtype="<i4").reshape(3, 4)
    for version in (1, 2, 3):
        with open(path(f"version{version}.npy"), "wb") as file:
            np.lib.format.write_array(file, counting, version=(version, 0))
    np.save(path("fortran.npy"), np.asfortranarray(counting))
    np.save(path("big_endian.npy"), counting.astype(">i4"))
    np.save(path("object.npy"), np.array([1, "two", None], dtype=object), allow_pickle=True)
    unicode = np.zeros(4, dtype=[("größe", "<f4"), ("数", "<i2")])
    np.save(path("unicode_fields.npy"), unicode)  # NumPy chooses version 3.0 for it


def structured():
    inner = np.dtype([("a", "<i2"), ("b", "<f8", (2, 3))])
    fields = {
        "simple": np.dtype([("x", "<f4"), ("y", "<f4"), ("label", "|S3")]),
        "nested": np.dtype([("id", "<u8"), ("inner", inner), ("more", inner, (2,))]),
        "aligned": np.dtype([("flag", "u1"), ("value", "<f8"), ("end", "u1")], align=True),
        "titles": np.dtype([(("a title, 'quoted'", "t"), "<i4"), ("u", "<i4")]),
        "mixed": np.dtype([("big", ">i4"), ("when", "<M8[us]"), ("text", "<U2")]),
        "many": np.dtype([(f"field_number_{i}", "<f4") for i in range(90)]),
    }
    arrays = {name: array(dtype, (3,)) for name, dtype in fields.items()}
    np.savez(path("structured_stored.npz"), **arrays)
    np.savez_compressed(path("structured_deflated.npz"), **arrays)


def names():
    """What a name can be, and members that are no arrays."""
    with zipfile.ZipFile(path("names.npz"), "w") as file:
        def add(name, value):
            data = io.BytesIO()
            np.save(data, np.array(value, dtype="<i4"))
            file.writestr(zipfile.ZipInfo(name), data.getvalue())
        add("x.npy", 1)
        add("x", 2)
        add("y.npy.npy", 3)
        add("dir/z.npy", 4)
        add("ä.npy", 5)
        add(".npy", 6)
        for name, text in ("readme.txt", "no array\n"), ("nothing", ""), ("folder/", ""):
            file.writestr(zipfile.ZipInfo(name), text)
    with zipfile.ZipFile(path("object.npz"), "w") as file:
        for name in ("object", "good"):
            data = io.BytesIO()
            np.save(data, np.array([1, 2], dtype=object if name == "object" else "<i4"),
                    allow_pickle=True)
            file.writestr(zipfile.ZipInfo(name + ".npy"), data.getvalue())


class Unseekable(io.RawIOBase):
    """Makes zipfile write data descriptors."""

    def __init__(self, file):
        self.file = file

    def writable(self):
        return True

    def seekable(self):
        return False

    def write(self, data):
        return self.file.write(data)


def zips():
    arrays = {"first": array("f4", (10,)), "second": array("i8", (4, 2))}
    with open(path("descriptors.npz"), "wb") as file:
        np.savez_compressed(Unseekable(file), **arrays)
    with zipfile.ZipFile(path("methods.npz"), "w") as file:
        data = io.BytesIO()
        np.save(data, arrays["first"])
        for name, method in ("bzip2", 12), ("lzma", 14), ("first", 8):
            file.writestr(zipfile.ZipInfo(name + ".npy"), data.getvalue(), method)
    np.savez(path("none.npz"))


def zip_entry(name, payload, data):
    name = name.encode()
    common = b"\0\0\x08\0\0\0\x21\0" + zlib.crc32(data).to_bytes(4, "little")
    common += len(payload).to_bytes(4, "little") + len(data).to_bytes(4, "little")
    common += len(name).to_bytes(2, "little") + b"\0\0"
    return b"PK\3\4\x14\0" + common + name + payload, lambda offset: (
        b"PK\1\2\x14\0\x14\0" + common + bytes(10) + offset.to_bytes(4, "little") + name)


def streams():
    """Deflate in all its forms; zlib and NumPy read each member here."""
    default, fixed = zlib.Z_DEFAULT_STRATEGY, zlib.Z_FIXED
    huffman, rle = zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE
    rows = [("zeros", 100000, 6, default), ("zeros", 1000, 9, fixed), ("zeros", 20000, 0, default)]
    rows += [("skew", 15000, 1, default), ("skew", 15000, 9, default), ("skew", 9000, 6, fixed)]
    rows += [("skew", 9000, 6, huffman), ("skew", 9000, 6, rle), ("lcg", 3000, 9, default)]
    rows += [("lcg", 3000, 6, huffman), ("lcg", 3000, 6, fixed), ("lcg", 0, 6, default)]
    rows += [("wave", 50000, 6, default), ("wave", 50000, 6, huffman)]
    rows += [("far30000", 70000, 9, default), ("far32768", 40000, 9, default)]
    near = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 300)
    rows += [(f"near{distance}", 5000 + distance, 6, default) for distance in near]
    locals_, entries, at = [], [], 0
    for number, (kind, count, level, strategy) in enumerate(rows):
        text = "{'descr': '|u1', 'fortran_order': False, 'shape': (%d,), }" % count
        head = b"\x93NUMPY\1\0\x76\0" + (text.ljust(117) + "\n").encode()  # 128 bytes
        data = head + pattern(kind, count)
        packer = zlib.compressobj(level, zlib.DEFLATED, -15, 9, strategy)
        payload = packer.compress(data[: len(data) // 2])
        if number % 3 == 1:  # an empty stored block in the middle
            payload += packer.flush(zlib.Z_SYNC_FLUSH)
        payload += packer.compress(data[len(data) // 2 :]) + packer.flush()
        assert zlib.decompress(payload, -15) == data
        local, entry = zip_entry(f"{kind}_{number}.npy", payload, data)
        locals_.append(local)
        entries.append(entry(at))
        at += len(local)
    directory = b"".join(entries)
    end = b"PK\5\6" + bytes(4) + len(rows).to_bytes(2, "little") * 2
    end += len(directory).to_bytes(4, "little") + at.to_bytes(4, "little") + bytes(2)
    with open(path("streams.npz"), "wb") as file:
        file.write(b"".join(locals_) + directory + end)
    with np.load(path("streams.npz")) as file:
        for name in file.files:
            kind = name.split("_")[0]
            assert file[name].tobytes() == pattern(kind, file[name].size), name


def main():
    dtypes()
    shapes()
    npy_files()
    structured()
    names()
    zips()
    streams()
    total = 0
    for name in sorted(os.listdir(HERE)):
        if name.endswith((".npy", ".npz")):
            total += os.path.getsize(path(name))
            print(f"{os.path.getsize(path(name)):8} {name}")
    print(f"{total:8} bytes")


if __name__ == "__main__":
    main()
