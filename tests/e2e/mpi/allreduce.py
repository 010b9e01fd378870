# Every rank adds up the same array with all others, first a few bytes and then enough for the single-copy path.
import numpy
from mpi4py import MPI

world = MPI.COMM_WORLD
for length in (10, 1_000_000):
    mine = numpy.arange(float(length)) + world.rank
    total = numpy.empty_like(mine)
    world.Allreduce(mine, total)
    expected = world.size * numpy.arange(float(length)) + sum(range(world.size))
    assert (total == expected).all(), (total, expected)
print(f"{world.rank} of {world.size} on {MPI.Get_processor_name()}: {int(total[1])}")
