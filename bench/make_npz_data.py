"""Makes the files that bench_npz reads: arrays of the kinds people train on, as NumPy writes them.

    python3 bench/make_npz_data.py [DIRECTORY]        (build/bench/npz; about 900 MB, half a minute)

Needs NumPy. The same bytes come out every time, up to the rounding of the machine: the numbers are
those of RandomState, which NumPy promises never to change. Photos are synthetic (a spectrum that
falls with the frequency, edges, sensor noise, then the rounding of a JPEG), and so are tokens (a
Zipf distribution with phrases that come again); both are tuned to compress as real ones do.
"""

import multiprocessing
import os
import sys
import zipfile

import numpy as np

MEMBERS = 8
MEMBER_BYTES = 2 << 20
SMALL_MEMBERS = 4096
IMAGE = 224


def random(name):
    return np.random.RandomState(sum(ord(c) << (i % 16) for i, c in enumerate(name)))


def normal(rng, count):
    return rng.standard_normal(count).astype(np.float32)


# ---- photos -------------------------------------------------------------------------------------


def field(rng, size, steepness):
    """A square of noise whose spectrum falls with the frequency; mean 0, deviation 1."""
    f = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.rfftfreq(size)[None, :])
    f[0, 0] = 1
    spectrum = np.fft.rfft2(rng.standard_normal((size, size))) / f**steepness
    spectrum[0, 0] = 0
    out = np.fft.irfft2(spectrum, (size, size))
    return out / out.std()


def dct_matrix():
    k = np.arange(8)
    m = np.cos(np.pi * (2 * k[None, :] + 1) * k[:, None] / 16) / 2
    m[0] /= np.sqrt(2)
    return m


def like_jpeg(plane, steps):
    """Rounds the frequencies of each block of 8 x 8."""
    n = plane.shape[0] // 8
    m = dct_matrix()
    blocks = plane.reshape(n, 8, n, 8).transpose(0, 2, 1, 3)
    f = np.round(m @ blocks @ m.T / steps) * steps
    return (m.T @ f @ m).transpose(0, 2, 1, 3).reshape(plane.shape)


def photo(rng):
    """One image: textures that meet at edges, noise, and colours that are smoother than light."""
    y, x = np.mgrid[0:IMAGE, 0:IMAGE]
    light = 120 + 45 * field(rng, IMAGE, 2)
    for _ in range(rng.randint(3, 9)):
        cx, cy, r = rng.randint(0, IMAGE, 2).tolist() + [rng.randint(10, 90)]
        inside = (x - cx) ** 2 + (y - cy) ** 2 * rng.uniform(0.5, 2) < r * r
        other = rng.uniform(30, 220) + rng.uniform(5, 30) * field(rng, IMAGE, 2)
        light = np.where(inside, other, light)
    light += rng.uniform(0.4, 1.2) * rng.standard_normal(light.shape)
    steps = 2 + np.add.outer(np.arange(8), np.arange(8))
    light = like_jpeg(light, 3 * steps)
    blue = like_jpeg(10 * field(rng, IMAGE, 1.8), 8 * steps)
    red = like_jpeg(10 * field(rng, IMAGE, 1.8), 8 * steps)
    rgb = np.stack([light + 1.4 * red, light - 0.34 * blue - 0.71 * red, light + 1.77 * blue], 2)
    return np.clip(np.round(rgb), 0, 255).astype(np.uint8)


def photos(rng, count):
    """`count` bytes of images, one after the other; each comes a few times, in another place."""
    per = IMAGE * IMAGE * 3
    out = np.empty((count + per - 1) // per * per, np.uint8).reshape(-1, IMAGE, IMAGE, 3)
    base = [photo(rng) for _ in range(min(len(out), 14))]
    for i in range(len(out)):
        image = base[i % len(base)]
        if i >= len(base):
            image = image[:, :: 1 - 2 * (i // len(base) % 2)]
            image = np.roll(image, rng.randint(8, 200, 2), (0, 1))
            image = np.clip(image.astype(np.int16) + rng.randint(-20, 20), 0, 255)
        out[i] = image
    return out.reshape(-1)[:count]


def normalised(pixels):
    mean = np.resize(np.float32([0.485, 0.456, 0.406]), len(pixels))
    deviation = np.resize(np.float32([0.229, 0.224, 0.225]), len(pixels))
    return (pixels / np.float32(255) - mean) / deviation


# ---- tokens and masks ---------------------------------------------------------------------------


def tokens(rng, count, phrases):
    """Numbers below 50,257 by Zipf's law; of `phrases` the text repeats a part, as people do."""
    out = (50257 ** rng.uniform(0, 1, count)).astype(np.int64) - 1
    at = 4096
    while at < count - 64:
        if rng.uniform() < phrases:
            length = 2 + int(rng.exponential(4))
            back = 1 + int(min(at - 1, 8000) * rng.uniform() ** 2)
            out[at : at + length] = np.resize(out[at - back : at], length)
            at += length
        else:
            at += 1 + int(rng.exponential(3))
    return out


def masks(rng, count):
    """Segmentation masks of 512 x 512: regions with smooth borders, 21 classes."""
    size = 512
    out = []
    for _ in range((count + size * size - 1) // (size * size)):
        fields = np.stack([field(rng, size, 3) for _ in range(6)])
        out.append(rng.randint(0, 21, 6).astype(np.uint8)[fields.argmax(0)].reshape(-1))
    return np.concatenate(out)[:count]


# ---- one function for each content --------------------------------------------------------------


def bf16(rng, count):
    return (normal(rng, count).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def relu(rng, count):
    return np.maximum(normal(rng, count), np.float32(0))


def sparse(rng, count):
    return np.where(rng.uniform(size=count) < 0.01, normal(rng, count), np.float32(0))


def mixed(rng, count):
    """Activations, and a quarter of weights: in turns of 1 MB."""
    turns = normal(rng, count).reshape(-1, 4, 1 << 18)
    turns[:, 1:] = np.maximum(turns[:, 1:], 0)
    return turns.reshape(-1)


CONTENTS = {  # name: (bytes of an element, what makes so many elements)
    "f32_normal": (4, normal),
    "f16_normal": (2, lambda rng, n: normal(rng, n).astype(np.float16)),
    "f32_relu": (4, relu),
    "f32_bf16": (4, bf16),
    "int8": (1, lambda rng, n: np.clip(normal(rng, n) * 20, -128, 127).astype(np.int8)),
    "photos_u8": (1, photos),
    "photos_f32": (4, lambda rng, n: normalised(photos(rng, n))),
    "tokens_i64": (8, lambda rng, n: tokens(rng, n, 0.82)),
    "tokens_u16": (2, lambda rng, n: tokens(rng, n, 0.73).astype(np.uint16)),
    "labels": (1, masks),
    "sparse": (4, sparse),
    "zeros": (4, lambda rng, n: np.zeros(n, np.float32)),
    "random": (1, lambda rng, n: rng.randint(0, 256, n).astype(np.uint8)),
}


def arrays(name):
    itemsize, make = CONTENTS[name]
    count = MEMBER_BYTES // itemsize
    all_of_it = make(random(name), MEMBERS * count)
    return {f"x{i}": all_of_it[i * count : (i + 1) * count] for i in range(MEMBERS)}


def small(name):
    rng = random(name)
    if name == "small_f32":
        return {f"x{i}": normal(rng, 256) for i in range(SMALL_MEMBERS)}
    return {f"x{i}": rng.randint(0, 1000, 128).astype(np.int64) for i in range(SMALL_MEMBERS)}


# ---- files --------------------------------------------------------------------------------------


def content(name):
    return name, np.savez_compressed, lambda: arrays(name)


FILES = [
    ("large_mixed", np.savez_compressed, lambda: {"x": mixed(random("mixed"), 64 << 20)}),
    ("large_photos", np.savez_compressed, lambda: {"x": photos(random("large"), 64 << 20)}),
    ("large_f32", np.savez_compressed, lambda: {"x": normal(random("large"), 16 << 20)}),
    ("stored_256mb", np.savez, lambda: {"x": normal(random("stored"), 64 << 20)}),
    ("stored_1kb", np.savez, lambda: {"x": normal(random("stored"), 1 << 8)}),
    ("stored_64kb", np.savez, lambda: {"x": normal(random("stored"), 1 << 14)}),
    ("stored_1mb", np.savez, lambda: {"x": normal(random("stored"), 1 << 18)}),
    ("stored_small", np.savez, lambda: small("small_f32")),
    ("small_f32", np.savez_compressed, lambda: small("small_f32")),
    ("small_i64", np.savez_compressed, lambda: small("small_i64")),
] + [content(name) for name in CONTENTS]


def make(task):
    directory, index = task
    name, save, what = FILES[index]
    path = os.path.join(directory, name + ".npz")
    save(path + ".part.npz", **what())
    os.replace(path + ".part.npz", path)
    with zipfile.ZipFile(path) as z:
        size = sum(m.file_size for m in z.infolist())
        return name, len(z.infolist()), size, sum(m.compress_size for m in z.infolist()) / size


def main():
    directory = sys.argv[1] if len(sys.argv) > 1 else "build/bench/npz"
    os.makedirs(directory, exist_ok=True)
    np.save(os.path.join(directory, "small.npy"), normal(random("small"), 256))
    with multiprocessing.Pool(os.cpu_count()) as pool:
        for row in pool.imap(make, [(directory, i) for i in range(len(FILES))], 1):
            print("%-14s %5d members %10d bytes, deflated to %.3f" % row, flush=True)


if __name__ == "__main__":
    main()
