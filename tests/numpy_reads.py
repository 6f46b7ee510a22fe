"""NumPy reads what examples/npz_writer.h writes. Arguments: the folder of numpy_reads.c, and pairs
of archives with the same arrays."""
import sys

import numpy as np

folder, pairs = sys.argv[1], sys.argv[2:]
f = np.load(folder + "/numpy.npz")
assert sorted(f.files) == ["struct", "zeros", "ä"], f.files
assert f["zeros"].shape == (1 + 258 * 50,) and not f["zeros"].any()
assert f["ä"].tolist() == [[0, 1, 2], [3, 4, 5]], f["ä"]
s = f["struct"]
assert s.dtype.names == ("größe", "s")
assert s["größe"].tolist() == [0, 2, 4], s
x = np.load(folder + "/numpy.npy", mmap_mode="r")
assert x.tolist() == [[0, 1, 2], [3, 4, 5]], x
print("ok   an archive, a name and a struct beyond ASCII, one array")
for a, b in zip(pairs[::2], pairs[1::2]):
    a, b = np.load(a), np.load(b)
    assert sorted(a.files) == sorted(b.files), (a.files, b.files)
    for name in a.files:
        assert a[name].dtype == b[name].dtype and np.array_equal(a[name], b[name]), name
    print("ok   what npz_convert has made of", a.zip.filename)
print(1 + len(pairs) // 2, "passed, 0 failed")
