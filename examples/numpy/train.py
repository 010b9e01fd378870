"""Trains a small network on synthetic images, data-parallel over MPI ranks, with numpy alone.

Every rank has its own images. After each batch the ranks average their gradients, so that all of them take the same step.
Rank 0 prints the loss and the images per second of all ranks. The exit code is 1 if the loss has not fallen.
"""

import os
import sys
import time

# More ranks than cores, as in the demo, would wait for each other on cores that the others need.
os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
import numpy
from mpi4py import MPI

CLASSES, PIXELS, HIDDEN = 10, 28 * 28, 64
IMAGES, BATCH, EPOCHS, RATE = 4096, 32, 5, 0.2

world = MPI.COMM_WORLD


def synthetic_images():
    """One pattern for each class, the same on all ranks, and this rank's own noise on it."""
    patterns = numpy.random.default_rng(0).normal(size=(CLASSES, PIXELS))
    own = numpy.random.default_rng(1 + world.rank)
    labels = own.integers(CLASSES, size=IMAGES // world.size)
    images = patterns[labels] + 8 * own.normal(size=(len(labels), PIXELS))
    return (images / 8).astype("f"), labels


def gradients(weights, images, labels):
    """The mean loss of a batch, and its gradient by every weight."""
    first, second = weights
    hidden = numpy.maximum(images @ first, 0)
    scores = hidden @ second
    scores -= scores.max(axis=1, keepdims=True)
    chances = numpy.exp(scores)
    chances /= chances.sum(axis=1, keepdims=True)
    rows = numpy.arange(len(labels))
    loss = -numpy.log(chances[rows, labels] + 1e-9).mean()
    chances[rows, labels] -= 1
    chances /= len(labels)
    return loss, [images.T @ (chances @ second.T * (hidden > 0)), hidden.T @ chances]


def average(mine):
    """The mean of all ranks' arrays."""
    total = numpy.empty_like(mine)
    world.Allreduce(mine, total)
    return total / world.size


def main():
    nodes = sorted(set(world.allgather(MPI.Get_processor_name())))
    if world.rank == 0:
        print(f"{world.size} ranks on {', '.join(nodes)}", flush=True)
    images, labels = synthetic_images()
    start = numpy.random.default_rng(0)
    weights = [
        start.normal(scale=PIXELS**-0.5, size=(PIXELS, HIDDEN)).astype("f"),
        start.normal(scale=HIDDEN**-0.5, size=(HIDDEN, CLASSES)).astype("f"),
    ]
    losses = []
    for epoch in range(1, EPOCHS + 1):
        begin, total = time.perf_counter(), 0.0
        batches = range(0, len(labels), BATCH)
        for at in batches:
            loss, changes = gradients(weights, images[at : at + BATCH], labels[at : at + BATCH])
            for weight, change in zip(weights, changes):
                weight -= RATE * average(change)
            total += loss
        losses.append(world.allreduce(total / len(batches)) / world.size)
        speed = world.size * len(labels) / (time.perf_counter() - begin)
        if world.rank == 0:
            print(f"epoch {epoch}: loss {losses[-1]:.3f}, {speed:.0f} images/s", flush=True)
    if not losses[-1] < losses[0]:
        sys.exit("the loss has not fallen")


main()
