# Runs in the tree, as root. Horovod is compiled against the TensorFlow and the MPI that are there; the compiler goes again.
pip install --quiet --no-deps /wheels/*.whl
HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_MPI=1 HOROVOD_WITHOUT_GLOO=1 \
  pip install --quiet --no-build-isolation --no-deps horovod
apt-get -qq -y purge --autoremove cmake g++ libopenmpi-dev make python3-dev python3-pip
