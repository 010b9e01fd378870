"""A program for the MPICH ABI: the numbers are those of its mpi.h. Prints which file the library is."""

import ctypes
import os
import sys

WORLD, INT, SUM = 0x44000000, 0x4C000405, 0x58000003

mpi = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
mpi.MPI_Init(None, None)
rank, size, total = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
mpi.MPI_Comm_rank(WORLD, ctypes.byref(rank))
mpi.MPI_Comm_size(WORLD, ctypes.byref(size))
own = ctypes.c_int(rank.value + 1)
mpi.MPI_Allreduce(ctypes.byref(own), ctypes.byref(total), 1, INT, SUM, WORLD)
with open("/proc/self/maps") as maps:
    files = {line.split()[-1] for line in maps if "libmpich.so" in line}
print(f"{rank.value} of {size.value}: {total.value} with {' '.join(sorted(files))}", flush=True)
mpi.MPI_Finalize()
