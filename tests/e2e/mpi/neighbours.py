# Every rank reads a text out of the memory of each rank on its node, as MPI libraries do (CMA, process_vm_readv).
import ctypes
import os
from mpi4py import MPI


class IoVec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


world = MPI.COMM_WORLD
node = world.Split_type(MPI.COMM_TYPE_SHARED)
libc = ctypes.CDLL(None, use_errno=True)
libc.process_vm_readv.restype = ctypes.c_ssize_t
text = ctypes.create_string_buffer(f"rank {world.rank}".encode(), 32)
for rank, pid, address in node.allgather((world.rank, os.getpid(), ctypes.addressof(text))):
    copy = ctypes.create_string_buffer(32)
    here, there = IoVec(ctypes.addressof(copy), 32), IoVec(address, 32)
    count = libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    seen = copy.value.decode() if count == 32 else os.strerror(ctypes.get_errno())
    print(f"{world.rank} reads {rank}: {seen}", flush=True)
node.Barrier()  # nobody leaves while others read
