"""Trains ResNet-50 on synthetic images with torch, data-parallel over the tasks of a step.

torch learns from the environment who takes part: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which --container-pytorch in
train.sbatch takes from Slurm. Every rank has its own batch, which it learns by heart; torch averages the gradients over all ranks. Rank 0 prints the loss
and the images per second of all ranks. The exit code is 1 if the loss has not fallen.
"""

import argparse
import os
import socket
import statistics
import sys
import time

# As many threads as Slurm gives the rank, for torch and for the libraries below it, which read this when they are loaded.
os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("SLURM_CPUS_PER_TASK", "1"))
os.environ.setdefault("USE_LIBUV", "0")  # Debian's torch is built without it, and does not know
import torch
import torch.distributed as dist
import torchvision

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=20)
options.add_argument("--batch", type=int, default=8, help="images of each rank in a step")
options.add_argument("--size", type=int, default=64, help="height and width of an image")
options = options.parse_args()

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)

model = torch.nn.parallel.DistributedDataParallel(torchvision.models.resnet50())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
images = torch.randn(options.batch, 3, options.size, options.size)
labels = torch.randint(1000, (options.batch,))

hosts = [None] * ranks
dist.all_gather_object(hosts, socket.gethostname())
if rank == 0:
    print(f"{ranks} ranks on {', '.join(sorted(set(hosts)))}", flush=True)

losses, times = [], []
for number in range(1, options.steps + 1):
    begin = time.perf_counter()
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach()
    dist.all_reduce(mean)
    losses.append(mean.item() / ranks)
    times.append(time.perf_counter() - begin)
    if rank == 0 and number % 5 == 0:
        print(f"step {number}: loss {losses[-1]:.3f}", flush=True)

# The first steps fill memory pools; one that something else on the machine has delayed does not count.
speed = ranks * options.batch / statistics.median(times[2:])
if rank == 0:
    print(f"{speed:.2f} images/s", flush=True)
dist.destroy_process_group()
if not losses[-1] < losses[0]:
    sys.exit("the loss has not fallen")
