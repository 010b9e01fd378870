# A client of PMI-2 on the descriptor that Slurm's mpi/pmi2 opens for each task: every rank publishes a value, all
# meet in the fence, and every rank reads all values. A message is its length in six digits, then key=value; pairs.
import os

rank, size = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])
server = open(int(os.environ["PMI_FD"]), "r+b", buffering=0)


def read(length):
    data = b""
    while len(data) < length:
        more = server.read(length - len(data))
        assert more, "the server hung up"
        data += more
    return data.decode()


def ask(**words):
    text = "".join(f"{key}={value};" for key, value in words.items()).encode()
    server.write(b"%6d" % len(text) + text)
    answer = dict(word.split("=", 1) for word in read(int(read(6))).split(";") if word)
    assert answer["rc"] == "0", (words, answer)
    return answer


# The first exchange is in the words of PMI-1.
server.write(b"cmd=init pmi_version=2 pmi_subversion=0\n")
line = ""
while not line.endswith("\n"):
    line += read(1)
assert line == "cmd=response_to_init rc=0 pmi_version=2 pmi_subversion=0\n", line
full = ask(cmd="fullinit", pmijobid=os.environ["PMI_JOBID"], pmirank=rank, threaded="FALSE")
assert (full["rank"], full["size"]) == (str(rank), str(size)), full
ask(cmd="kvs-put", key=f"rank-{rank}", value=rank * 10)
ask(cmd="kvs-fence")
values = [
    ask(cmd="kvs-get", jobid=os.environ["PMI_JOBID"], srcid=-1, key=f"rank-{other}")["value"] for other in range(size)
]
ask(cmd="finalize")
print(f"{rank} of {size}: {' '.join(values)}")
