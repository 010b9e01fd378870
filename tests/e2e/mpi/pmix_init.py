# The smallest PMIx client: says who it is and leaves. Whatever its library complains about goes to stderr.
import ctypes

pmix = ctypes.CDLL("libpmix.so.2")


class Process(ctypes.Structure):
    _fields_ = [("namespace", ctypes.c_char * 256), ("rank", ctypes.c_uint32)]


me = Process()
code = pmix.PMIx_Init(ctypes.byref(me), None, ctypes.c_size_t(0))
assert code == 0, code
print(me.rank)
pmix.PMIx_Finalize(None, ctypes.c_size_t(0))
