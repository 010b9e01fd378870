"""Trains ResNet-50 on synthetic images with TensorFlow, data-parallel over MPI ranks with Horovod.

Every rank has its own batch, which it learns by heart; Horovod averages the gradients over all ranks. Rank 0 prints the loss and
the images per second of all ranks. The exit code is 1 if the loss has not fallen.
"""

import argparse
import os
import socket
import statistics
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # what TensorFlow says of the processor is not for every rank to repeat
# More ranks than cores, as in the demo, would wait for each other on cores that the others need.
os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
import horovod.tensorflow as hvd
import tensorflow as tf
from mpi4py import MPI

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=20)
options.add_argument("--batch", type=int, default=8, help="images of each rank in a step")
options.add_argument("--size", type=int, default=64, help="height and width of an image")
options = options.parse_args()

hvd.init()
threads = int(os.environ.get("SLURM_CPUS_PER_TASK", 1))
tf.config.threading.set_intra_op_parallelism_threads(threads)
tf.config.threading.set_inter_op_parallelism_threads(1)
tf.random.set_seed(hvd.rank())

model = tf.keras.applications.ResNet50(weights=None, input_shape=(options.size, options.size, 3))
optimizer = tf.keras.optimizers.legacy.SGD(0.01, momentum=0.9)
cross_entropy = tf.keras.losses.SparseCategoricalCrossentropy()
images = tf.random.normal((options.batch, options.size, options.size, 3))
labels = tf.random.uniform((options.batch,), maxval=1000, dtype=tf.int64)


@tf.function
def step():
    with tf.GradientTape() as tape:
        loss = cross_entropy(labels, model(images, training=True))
    # All in one call: hvd.DistributedGradientTape takes many seconds to make its part of the graph.
    gradients = hvd.grouped_allreduce(tape.gradient(loss, model.trainable_variables))
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


nodes = sorted(set(MPI.COMM_WORLD.allgather(socket.gethostname())))
if hvd.rank() == 0:
    print(f"{hvd.size()} ranks on {', '.join(nodes)}", flush=True)
hvd.broadcast_variables(model.variables, root_rank=0)

losses, times = [], []
for number in range(1, options.steps + 1):
    begin = time.perf_counter()
    losses.append(float(hvd.allreduce(step())))
    times.append(time.perf_counter() - begin)
    if hvd.rank() == 0 and number % 5 == 0:
        print(f"step {number}: loss {losses[-1]:.3f}", flush=True)

# The first steps make the graph and fill memory pools; one that something else on the machine has delayed does not count.
speed = hvd.size() * options.batch / statistics.median(times[2:])
if hvd.rank() == 0:
    print(f"{speed:.2f} images/s", flush=True)
if not losses[-1] < losses[0]:
    sys.exit("the loss has not fallen")
