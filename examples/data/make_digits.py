#!/usr/bin/env python3
"""Write digits_train_00.npz ... digits_train_47.npz and digits_test.npz next to this file.

Needs numpy and scikit-learn (which ships the data set; nothing is downloaded). Every run writes
the same arrays. The bytes of the deflated files may differ with another version of zlib.
"""
import pathlib

import numpy
from sklearn.datasets import load_digits

TRAIN_FILES = 48
TEST_EVERY = 5  # every fifth image of each class is for the test
SEED = 1998


def main():
    folder = pathlib.Path(__file__).resolve().parent
    digits = load_digits()
    images = digits.images.astype(numpy.uint8)  # [1797, 8, 8], values 0 to 16
    labels = digits.target.astype(numpy.uint8)  # [1797], values 0 to 9
    assert images.shape == (1797, 8, 8) and (images == digits.images).all()

    random = numpy.random.RandomState(SEED)  # its numbers are frozen across NumPy versions
    order = random.permutation(len(labels))
    by_class = order[numpy.argsort(labels[order], kind="stable")]
    test = numpy.sort(by_class[::TEST_EVERY])
    train = random.permutation(numpy.setdiff1d(order, test))

    numpy.savez_compressed(folder / "digits_test.npz", images=images[test], labels=labels[test])
    for number, part in enumerate(numpy.array_split(train, TRAIN_FILES)):
        save = numpy.savez_compressed if number % 2 else numpy.savez  # deflated and stored
        save(folder / f"digits_train_{number:02d}.npz", images=images[part], labels=labels[part])


if __name__ == "__main__":
    main()
